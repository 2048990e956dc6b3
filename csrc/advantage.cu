// Advantages on CUDA: one pass over the tokens, which reads each input once and writes each output once.
//
// The recurrence is that of advantage.cpp: a stretch of tokens is a step x -> m x + b, backwards in time, and m = -1
// says that a sequence ends within it, so that what comes in does not count. A tile of tokens is a block's, which
// composes the step of the tile. If it needs what comes in from later tokens, it composes the steps of the tiles
// between, which other blocks have published (a decoupled look-back, Merrill and Garland 2016). Unlike there, the steps
// are composed in one order whatever is published first: those of the tile's group of 32, then those of whole groups.
// So the same input has the same bits, and nothing waits for a chain of blocks. All arithmetic is float64.
//
// Blocks stay, and draw one tile after another, from the last tokens to the first. So all tiles that a block waits for
// are of blocks which run, however many blocks the device has room for. While a block walks over a tile, the next one
// is on its way from memory. A warp beside those that walk prepares it: where its sequences end, and who draws what.

#include "advantage.cuh"

namespace megatron_rl {
namespace {

constexpr int kResident = 2;  // blocks of a multiprocessor: what registers allow without spills

// By one warp: how many sequences end at or before token `limit`.
__device__ int64_t ended_by(const Scan& s, int64_t limit, int lane) {
  if (!s.cu) return s.length == 0 ? s.sequences : min(limit / s.length, s.sequences);
  int64_t low = 0, high = s.sequences;
  while (low < high) {
    const int64_t step = (high - low + 32) / 33, probe = low + (lane + 1) * step - 1;
    const bool ended = probe < high && __ldg(s.cu + probe + 1) <= limit;
    const int count = __popc(__ballot_sync(kAll, ended));
    if (count < 32) high = min(high, low + (count + 1) * step - 1);
    low += count * step;
  }
  return low;
}

// The sequence of token t, which is one of first..last.
__device__ int64_t sequence_of(const Scan& s, int64_t token, int64_t first, int64_t last) {
  while (first < last) {
    const int64_t middle = (first + last) / 2;
    if (s.first(middle + 1) <= token) first = middle + 1;
    else last = middle;
  }
  return first;
}

// A walk back over tokens, with what holds for the sequence that each is in.
template <int N>
struct Cursor {
  int64_t sequence = 0;
  double decay[N];  // gamma times lambda
  double rest[N];   // gamma - decay
  bool counted = true;

  __device__ explicit Cursor(const Scan& s) {
#pragma unroll
    for (int k = 0; k < N; k++) set(s, k, k == 0 ? s.lam : s.critic_lam);
  }

  __device__ void set(const Scan& s, int k, double lam) { decay[k] = s.gamma * lam, rest[k] = s.gamma - decay[k]; }

  __device__ void read(const Scan& s) {
    if (s.lams) set(s, 0, __ldg(s.lams + sequence));
    if (N == 2 && s.critic_lams) set(s, N - 1, __ldg(s.critic_lams + sequence));
    if (s.kept) counted = __ldg(s.kept + sequence) != 0;
  }

  __device__ void start(const Scan& s, int64_t token, int64_t first, int64_t last) {
    sequence = min(sequence_of(s, token, first, last), s.sequences - 1);
    read(s);
  }

  __device__ void back_to(const Scan& s, int64_t token) {
    while (sequence > 0 && s.first(sequence) > token) sequence--;
    read(s);
  }
};

// Walks back over a stretch of tokens, by the sequences they are in, which end at the bits of `ends`. Calls
// walk(tokens), bits, of each sequence, and cut() where one ends. of_sequences: the cursor follows. at: first token.
template <int N, class Walk, class Cut>
__device__ void over_sequences(const Scan& s, unsigned ends, bool of_sequences, int64_t at, Cursor<N>& cursor,
                               Walk walk, Cut cut) {
  unsigned open = kStretchBits;
  while (true) {
    const unsigned above = ends ? kAll << (32 - __clz(ends)) : kAll;
    walk(open & above);
    if (!ends) return;
    cut();
    open &= ~above;
    ends &= ~above >> 1;
    if (of_sequences) cursor.back_to(s, at + 31 - __clz(open));
  }
}

// base^exponent, for 0 to kStretch.
__device__ double power(double base, int exponent) {
  double result = 1.0;
#pragma unroll
  for (int bit = 1; bit <= kStretch; bit *= 2, base *= base) result = exponent & bit ? result * base : result;
  return result;
}

__device__ double sum_lanes(double mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_down_sync(kAll, mine, distance);
  return mine;
}

// Of the advantages of a warp that count, which lie in `room`. counted: bits of the thread's own. Sums are about one of
// them.
__device__ Sums sums_of(const char* room, unsigned counted, int lane) {
  const unsigned lanes = __ballot_sync(kAll, counted != 0);
  if (lanes == 0) return {0.0, 0.0, 0.0, 0.0};
  const int first = __ffs(lanes) - 1, item = __ffs(__shfl_sync(kAll, counted, first)) - 1;
  const double pivot = result_at(room, first * kItems + item);
  double sum = 0.0, squares = 0.0;
#pragma unroll
  for (int j = 0; j < kItems / 4; j++) {
    const float4 four = *reinterpret_cast<const float4*>(room + chunk_at(lane * (kItems / 4) + j));
    const float advantages[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (counted >> (4 * j + i) & 1) {
        const double gap = static_cast<double>(advantages[i]) - pivot;
        sum += gap, squares += gap * gap;
      }
    }
  }
  const int count = __reduce_add_sync(kAll, __popc(counted));
  return {static_cast<double>(count), pivot, sum_lanes(sum), sum_lanes(squares)};
}

// Number of this block's share of sequences whose bounds or lambdas cannot be.
__device__ int faults_of(const Scan& s) {
  int faults = 0;
  const int64_t from = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
#pragma unroll 1
  for (int64_t i = from; i < s.sequences; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    if (s.cu) faults += s.cu[i] > s.cu[i + 1];
    if (s.lams) faults += !(s.lams[i] >= 0.0 && s.lams[i] <= 1.0);
    if (s.critic_lams) faults += !(s.critic_lams[i] >= 0.0 && s.critic_lams[i] <= 1.0);
  }
  if (from == 0 && s.cu) faults += s.cu[0] != 0 || s.cu[s.sequences] != s.tokens;
  return faults;
}

// What the warps of a block tell each other.
template <int N>
struct Shared {
  unsigned ends[2][kTile / 32];  // a bit for each token of a tile: the last of its sequence
  int64_t bounds[2][2];          // sequences that end before a tile, and before the tile after it
  int next;                      // place of the block's next tile
  bool is_last;
  Step<N> warp_steps[kWarps], after_warp[kWarps];
  double carried[N];
  Sums warp_sums[kWarps];
  int first;
  double sums[kWarps + 1][3];
};

// By the warp that looks ahead: draws the next tile, and says where its sequences end.
template <int N>
__device__ void look_ahead(const Scan& s, const Board& board, int64_t tiles, int stage, int lane, Shared<N>& shared) {
  int place = 0;
  if (lane == 0) shared.next = place = atomicAdd(board.tickets, 1) + 1;
  place = __shfl_sync(kAll, place, 0);
  if (place >= tiles) return;
  unsigned* ends = shared.ends[stage];
  const int64_t begin = (tiles - 1 - place) * kTile;
  for (int i = lane; i < kTile / 32; i += 32) ends[i] = 0;
  const int64_t first = ended_by(s, begin, lane), last = ended_by(s, begin + kTile, lane);
  if (lane == 0) shared.bounds[stage][0] = first, shared.bounds[stage][1] = last;
  __syncwarp();
#pragma unroll 1
  for (int64_t i = first + lane; i < last; i += 32) {
    const int64_t at = s.first(i + 1) - 1 - begin;
    if (at >= 0 && at < kTile) atomicOr(ends + at / 32, 1u << (at % 32));
  }
}

// By the warp that looks ahead, once all others are done with the tile.
template <int N>
__device__ void write_sums(const Board& board, int64_t tile, int lane, const Shared<N>& shared) {
  Sums sums{0.0, 0.0, 0.0, 0.0};
  if (lane < kWarps) sums = shared.warp_sums[lane];
  const unsigned lanes = __ballot_sync(kAll, sums.count != 0.0);
  sums = sums.about_pivot(__shfl_sync(kAll, sums.pivot, lanes ? __ffs(lanes) - 1 : 0));
  sums.count = sum_lanes(sums.count), sums.sum = sum_lanes(sums.sum), sums.squares = sum_lanes(sums.squares);
  if (lane == 0) board.sums[tile] = sums;
}

// By the block that ends last: the stats of all tiles, in one order. Sums are about the pivot of the first tile that
// has one.
template <int N>
__device__ void write_stats(const Board& board, int64_t tiles, double* stats, Shared<N>& shared) {
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = static_cast<int>(tiles);
  if (threadIdx.x == 0) shared.first = count;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (__ldcg(&board.sums[i].count) != 0.0) {
      atomicMin(&shared.first, i);
      break;
    }
  }
  __syncthreads();
  const double pivot = shared.first < count ? __ldcg(&board.sums[shared.first].pivot) : 0.0;
  double mine[3] = {};  // count, sum, squares
#pragma unroll 8
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const double2* halves = reinterpret_cast<const double2*>(board.sums + i);
    const double2 low = __ldcg(halves), high = __ldcg(halves + 1);
    const Sums sums = Sums{low.x, low.y, high.x, high.y}.about_pivot(pivot);
    mine[0] += sums.count, mine[1] += sums.sum, mine[2] += sums.squares;
  }
#pragma unroll
  for (int k = 0; k < 3; k++) {
    mine[k] = sum_lanes(mine[k]);
    if (lane == 0) shared.sums[warp][k] = mine[k];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i <= kWarps; i++) {
    for (int k = 0; k < 3; k++) mine[k] += shared.sums[i][k];
  }
  const Moments whole = about(pivot, mine[0], mine[1], mine[2]);
  stats[0] = whole.count, stats[1] = whole.mean, stats[2] = whole.m2;
  stats[3] = static_cast<double>(__ldcg(board.stray) + 1), stats[4] = static_cast<double>(__ldcg(board.faults) + 1);
}

// What a thread keeps of its tokens between the two walks over them.
template <int N>
struct Kept {
  unsigned mask, ends;
  Cursor<N> cursor;  // at the last token
  Step<N> after;     // the step of the warp's tokens after the thread's
};

// The first walk: the steps of the thread's tokens, of those after them, and of the warp's.
template <class T, int N, bool KL>
__device__ Step<N> first_walk(const Scan& s, const Rooms& rooms, int64_t at, bool of_sequences, int lane, int& stray,
                              Kept<N>& kept) {
  Cursor<N> cursor = kept.cursor;
  Step<N> step = nothing<N>();
#pragma unroll 1
  for (int from = kItems - kStretch; from >= 0; from -= kStretch) {
    const Stretch<T, KL> tokens(s, rooms, lane * kItems + from);
    const unsigned mask = kept.mask >> from & kStretchBits;
    stray += __popc(tokens.rewarded & ~mask);
    const auto walk = [&](unsigned of_sequence) {
      const unsigned trained = mask & of_sequence;
#pragma unroll
      for (int i = kStretch - 1; i >= 0; i--) {
        const double reward = tokens.rewards[i], value = tokens.values[i];
#pragma unroll
        for (int k = 0; k < N; k++) {
          const double own = cursor.decay[k] * reward + cursor.rest[k] * value;
          if (trained >> i & 1) step.b[k] = cursor.decay[k] * step.b[k] + own;
        }
      }
#pragma unroll
      for (int k = 0; k < N; k++) step.m[k] *= power(cursor.decay[k], __popc(trained));
    };
    const auto cut = [&] {
#pragma unroll
      for (int k = 0; k < N; k++) step.m[k] = -1.0, step.b[k] = 0.0;
    };
    over_sequences(s, kept.ends >> from & kStretchBits, of_sequences, at + from, cursor, walk, cut);
  }
  __syncwarp();
  step = steps_from_above(step, lane);
  kept.after = from_above(step, 1);
  if (lane == 31) kept.after = nothing<N>();
  return from_lane(step, 0);
}

// The second walk: advantages and returns into shared memory, and the sums of the warp's. in: what comes
// in after the warp's last token.
template <class T, int N, bool KL>
__device__ Sums second_walk(const Scan& s, const Rooms& rooms, int64_t at, bool of_sequences, int lane,
                               const Step<N>& in, const Kept<N>& kept) {
  Cursor<N> cursor = kept.cursor;
  Step<N> x = then(in, kept.after);  // of which b counts
  unsigned counted = 0;
#pragma unroll 1
  for (int from = kItems - kStretch; from >= 0; from -= kStretch) {
    const Stretch<T, KL> tokens(s, rooms, lane * kItems + from);
    const unsigned mask = kept.mask >> from & kStretchBits;
    float advantages[kStretch] = {}, returns[kStretch] = {};
    const auto walk = [&](unsigned of_sequence) {
      const unsigned trained = mask & of_sequence;
      if (cursor.counted) counted |= trained << from;
#pragma unroll
      for (int i = kStretch - 1; i >= 0; i--) {
        const double reward = tokens.rewards[i], value = tokens.values[i], delta = reward - value;
        const bool here = trained >> i & 1;
        const double returned = value + (delta + x.b[N - 1]);
        advantages[i] = here ? static_cast<float>(delta + x.b[0]) : advantages[i];
        returns[i] = here ? static_cast<float>(returned) : returns[i];
#pragma unroll
        for (int k = 0; k < N; k++) {
          const double own = cursor.decay[k] * reward + cursor.rest[k] * value;
          if (here) x.b[k] = cursor.decay[k] * x.b[k] + own;
        }
      }
    };
    const auto cut = [&] {
#pragma unroll
      for (int k = 0; k < N; k++) x.b[k] = 0.0;
    };
    over_sequences(s, kept.ends >> from & kStretchBits, of_sequences, at + from, cursor, walk, cut);
    give(rooms.rewards, lane * kItems + from, advantages);
    if (s.returns) give(rooms.values(), lane * kItems + from, returns);
  }
  __syncwarp();
  return sums_of(rooms.rewards, counted, lane);
}

// By the first warp: what comes in after the tokens of each warp.
template <int N>
__device__ void join_warps(const Board& board, int64_t place, bool closed, int lane, Shared<N>& shared) {
  Step<N> step = nothing<N>();
  if (lane < kWarps) step = shared.warp_steps[lane];
  step = steps_from_above(step, lane);
  const Step<N> above = from_above(step, 1);
  if (lane < kWarps) shared.after_warp[lane] = above;
  look_back(board, place, from_lane(step, 0), closed, lane, shared.carried);
}

template <class T, int N, bool KL>
__global__ void __launch_bounds__(kThreads, kResident)
    scan_kernel(const Scan s, const Board board, const int64_t tiles, const bool aligned, const int columns) {
  extern __shared__ __align__(16) char room[];
  __shared__ Shared<N> shared;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const bool walks = warp < kWarps, of_sequences = s.sequences > 0 && (s.lams || s.critic_lams || s.kept);
  const int mine = warp * kSpan;  // the warp's first token in a tile
  int stray = 0;

  if (!walks) look_ahead(s, board, tiles, 0, lane, shared);
  __syncthreads();
  int64_t place = shared.next, before = -1;  // tiles from the end of the data: this one, and the one before it
  if (walks && place < tiles)
    fetch_tile<T, KL>(s, Rooms(room, 0, columns, warp), (tiles - 1 - place) * kTile + mine, aligned, lane);
  const int faults = faults_of(s);
  __syncthreads();
  for (int stage = 0; place < tiles; stage ^= 1) {
    const Rooms rooms(room, stage, columns, warp);
    const int64_t begin = (tiles - 1 - place) * kTile, at = begin + mine + lane * kItems;
    Kept<N> kept{0, 0, Cursor<N>(s), nothing<N>()};
    if (walks) {
      wait_for_copies();
      __syncwarp();
      kept.mask = take_mask(rooms.mask, lane);
      const int in_tile = mine + lane * kItems;
      kept.ends = shared.ends[stage][in_tile / 32] >> (in_tile % 32) & kItemBits;
      if (of_sequences) kept.cursor.start(s, at + kItems - 1, shared.bounds[stage][0], shared.bounds[stage][1]);
      const Step<N> of_warp = first_walk<T, N, KL>(s, rooms, at, of_sequences, lane, stray, kept);
      if (lane == 0) shared.warp_steps[warp] = of_warp;
    } else {
      look_ahead(s, board, tiles, stage ^ 1, lane, shared);
    }
    __syncthreads();
    const int64_t next = shared.next;
    if (walks && next < tiles)
      fetch_tile<T, KL>(s, Rooms(room, stage ^ 1, columns, warp), (tiles - 1 - next) * kTile + mine, aligned, lane);
    const bool closed = place == 0 || shared.ends[stage][kTile / 32 - 1] >> 31;
    if (warp == 0) join_warps(board, place, closed, lane, shared);
    if (!walks && before >= 0) write_sums(board, before, lane, shared);
    __syncthreads();
    if (walks) {
      Step<N> in;
#pragma unroll
      for (int k = 0; k < N; k++) in.m[k] = -1.0, in.b[k] = shared.carried[k];
      in = then(in, shared.after_warp[warp]);
      const Sums sums = second_walk<T, N, KL>(s, rooms, at, of_sequences, lane, in, kept);
      if (lane == 0) shared.warp_sums[warp] = sums;
      const int64_t from = begin + mine, valid = s.tokens - from;
      const bool fast = aligned && valid >= kSpan;
      write_out(s.advantages + from, rooms.rewards, fast, valid, lane);
      if (s.returns) write_out(s.returns + from, rooms.values(), fast, valid, lane);
      __syncwarp();
    }
    before = place, place = next;
  }
  __syncthreads();
  if (!walks && before >= 0) write_sums(board, before, lane, shared);
  const int all_stray = __reduce_add_sync(kAll, stray), all_faults = __reduce_add_sync(kAll, faults);
  if (lane == 0 && all_stray) atomicAdd(board.stray, all_stray);
  if (lane == 0 && all_faults) atomicAdd(board.faults, all_faults);
  __syncthreads();
  if (threadIdx.x == 0) {
    __threadfence();
    shared.is_last = atomicAdd(board.done, 1) + 1 == gridDim.x - 1;
  }
  __syncthreads();
  if (!shared.is_last) return;
  __threadfence();
  write_stats(board, tiles, s.stats, shared);
}

cudaStream_t current_stream(const Tensor& one) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(one.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

bool is_aligned(const void* data, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

template <class T, int N, bool KL>
void launch(const Scan& s, const Board& board, int64_t tiles, bool aligned, cudaStream_t stream, int device) {
  const auto kernel = scan_kernel<T, N, KL>;
  const int columns = KL ? s.ref ? 4 : 3 : 2, bytes = 2 * Rooms::tile_bytes(columns);
  int processors = 0;
  STD_CUDA_CHECK(cudaDeviceGetAttribute(&processors, cudaDevAttrMultiProcessorCount, device));
  STD_CUDA_CHECK(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
  const auto grid = static_cast<unsigned>(std::min<int64_t>(tiles, processors * kResident));
  kernel<<<grid, kThreads, bytes, stream>>>(s, board, tiles, aligned, columns);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
}

template <class T, int N>
void launch(const Scan& s, const Board& board, int64_t tiles, bool aligned, cudaStream_t stream, int device) {
  if (s.kl_kind == kNoKl) launch<T, N, false>(s, board, tiles, aligned, stream, device);
  else launch<T, N, true>(s, board, tiles, aligned, stream, device);
}

std::tuple<Tensor, Tensor, Tensor> gae(Tensor rewards, MaybeTensor values, Tensor mask, MaybeTensor cu_seqlens,
                                       MaybeTensor kept, MaybeTensor kl, MaybeTensor ref, int64_t kl_kind,
                                       double kl_coef, double gamma, double lam, double critic_lam, MaybeTensor lams,
                                       MaybeTensor critic_lams) {
  const torch::stable::accelerator::DeviceGuard guard(rewards.get_device_index());
  const Prepared p = prepare(rewards, values, mask, cu_seqlens, kept, kl, ref, kl_kind, kl_coef, gamma, lam, critic_lam,
                             lams, critic_lams);
  const Scan& s = p.scan;
  // Without tokens, one block looks at what is wrong with the sequences.
  const int64_t tiles = s.tokens == 0 ? 1 : (s.tokens + kTile - 1) / kTile, groups = (tiles + kGroup - 1) / kGroup;
  STD_TORCH_CHECK(tiles < (int64_t{1} << 31), "too many tokens for one call");
  const bool two = s.two || s.lams || s.critic_lams;
  const int64_t lambdas = two ? 2 : 1, messages = lambdas * (tiles + groups);
  const int64_t cleared = sizeof(Message) * messages + 32, num_doubles = cleared / 8 + 4 * tiles;
  const Tensor doubles = torch::stable::new_empty(p.stats, {&num_doubles, 1}, ScalarType::Double);
  const cudaStream_t stream = current_stream(rewards);
  Board board;
  board.tile_steps = static_cast<Message*>(doubles.mutable_data_ptr());
  board.group_steps = board.tile_steps + lambdas * tiles;
  board.stray = reinterpret_cast<unsigned long long*>(board.tile_steps + messages), board.faults = board.stray + 1;
  board.tickets = reinterpret_cast<int*>(board.stray + 2), board.done = board.tickets + 1;
  board.sums = reinterpret_cast<Sums*>(board.stray + 4);
  STD_CUDA_CHECK(cudaMemsetAsync(board.tile_steps, 0xff, cleared, stream));
  bool aligned = is_aligned(s.mask, 16) && is_aligned(s.advantages, 16) && is_aligned(s.returns, 16);
  for (const void* one : {s.rewards, s.values, s.kl, s.ref}) aligned = aligned && is_aligned(one, 16);
  const int device = rewards.get_device_index();
  if (s.half && two) launch<__nv_bfloat16, 2>(s, board, tiles, aligned, stream, device);
  else if (s.half) launch<__nv_bfloat16, 1>(s, board, tiles, aligned, stream, device);
  else if (two) launch<float, 2>(s, board, tiles, aligned, stream, device);
  else launch<float, 1>(s, board, tiles, aligned, stream, device);
  return p.results();
}

// Four tokens as float32, 0 from `valid` on. fast: all are there, and aligned.
__device__ float4 load_four(const float* from, bool fast, int64_t valid) {
  if (fast) return __ldg(reinterpret_cast<const float4*>(from));
  return {from[0], valid > 1 ? from[1] : 0.0f, valid > 2 ? from[2] : 0.0f, valid > 3 ? from[3] : 0.0f};
}

__device__ float4 load_four(const uint16_t* from, bool fast, int64_t valid) {
  ushort4 halves;
  if (fast) halves = __ldg(reinterpret_cast<const ushort4*>(from));
  else halves = {from[0], valid > 1 ? from[1] : uint16_t{0}, valid > 2 ? from[2] : uint16_t{0},
                 valid > 3 ? from[3] : uint16_t{0}};
  const auto widen = [](unsigned short half) { return __uint_as_float(static_cast<unsigned>(half) << 16); };
  return {widen(halves.x), widen(halves.y), widen(halves.z), widen(halves.w)};
}

template <class T>
__global__ void whiten_kernel(const Scan s, const double* mean_std, const bool shift_mean, const bool aligned,
                              const T* values, float* to) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kWalkers + threadIdx.x) * 4, valid = s.tokens - at;
  if (valid <= 0) return;
  const bool fast = aligned && valid >= 4;
  const float4 row = load_four(values + at, fast, valid);
  uchar4 mask;
  if (fast) mask = __ldg(reinterpret_cast<const uchar4*>(s.mask + at));
  else mask = {s.mask[at], valid > 1 ? s.mask[at + 1] : uint8_t{0}, valid > 2 ? s.mask[at + 2] : uint8_t{0},
               valid > 3 ? s.mask[at + 3] : uint8_t{0}};
  const double mean = __ldg(mean_std), scale = 1.0 / (__ldg(mean_std + 1) + 1e-8), back = shift_mean ? 0.0 : mean;
  int64_t sequence = s.kept ? sequence_of(s, at, 0, s.sequences - 1) : 0;
  const auto whitened = [&](float value, bool trained, int64_t token) {
    while (s.kept && sequence < s.sequences - 1 && s.first(sequence + 1) <= token) sequence++;
    const bool counted = trained && (!s.kept || __ldg(s.kept + sequence));
    return counted ? static_cast<float>((static_cast<double>(value) - mean) * scale + back) : 0.0f;
  };
  const float results[4] = {whitened(row.x, mask.x, at), whitened(row.y, mask.y, at + 1),
                            whitened(row.z, mask.z, at + 2), whitened(row.w, mask.w, at + 3)};
  if (fast) *reinterpret_cast<float4*>(to + at) = {results[0], results[1], results[2], results[3]};
  for (int i = 0; !fast && i < 4 && i < valid; i++) to[at + i] = results[i];
}

Tensor whiten(Tensor values, Tensor mask, MaybeTensor cu_seqlens, MaybeTensor kept, Tensor mean_std, bool shift_mean) {
  check_whiten(values, mask, cu_seqlens, kept, mean_std);
  const torch::stable::accelerator::DeviceGuard guard(values.get_device_index());
  const Tensor from = compact(values), masks = compact(mask);
  const Tensor pair = compact(mean_std);
  const MaybeTensor cu = compact(cu_seqlens), keeps = compact(kept);
  Tensor whitened = torch::stable::new_empty(from, values.sizes(), ScalarType::Float);
  Scan s{};
  s.tokens = values.numel(), s.cu = data<int64_t>(cu), s.kept = data<uint8_t>(keeps);
  s.sequences = s.cu ? cu->numel() - 1 : values.size(0), s.length = s.cu ? 0 : values.size(1);
  s.mask = static_cast<const uint8_t*>(masks.const_data_ptr());
  if (s.tokens == 0) return whitened;
  const auto grid = static_cast<unsigned>((s.tokens + 4 * kWalkers - 1) / (4 * kWalkers));
  float* to = static_cast<float*>(whitened.mutable_data_ptr());
  const void* at = from.const_data_ptr();
  const auto* moments = static_cast<const double*>(pair.const_data_ptr());
  const bool aligned = is_aligned(at, 16) && is_aligned(s.mask, 4) && is_aligned(to, 16);
  const cudaStream_t stream = current_stream(values);
  const auto* floats = static_cast<const float*>(at);
  const auto* halves = static_cast<const uint16_t*>(at);
  if (values.scalar_type() == ScalarType::Float)
    whiten_kernel<float><<<grid, kWalkers, 0, stream>>>(s, moments, shift_mean, aligned, floats, to);
  else whiten_kernel<uint16_t><<<grid, kWalkers, 0, stream>>>(s, moments, shift_mean, aligned, halves, to);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return whitened;
}

// ids: sorted. order: where each was. A warp looks at 32 places, and computes the groups that begin there.
__global__ void groups_kernel(const int64_t* ids, const int64_t* order, const double* returns, int64_t n, int64_t kind,
                              double* advantages, double* means, double* stds) {
  const int lane = threadIdx.x % 32;
  const int64_t base = (static_cast<int64_t>(blockIdx.x) * kWalkers + threadIdx.x) / 32 * 32, place = base + lane;
  unsigned heads = __ballot_sync(kAll, place < n && (place == 0 || ids[place] != ids[place - 1]));
  for (; heads; heads &= heads - 1) {
    const int64_t begin = base + __ffs(heads) - 1, id = ids[begin];
    const double first = returns[order[begin]];
    double count = 0.0, sum = 0.0;
    int flat = 1;
    for (int64_t i = begin + lane; i < n && ids[i] == id; i += 32) {
      const double one = returns[order[i]];
      count += 1.0, sum += one, flat &= one == first;  // not equal if NaN
    }
    count = __shfl_sync(kAll, sum_lanes(count), 0), sum = __shfl_sync(kAll, sum_lanes(sum), 0);
    flat = __all_sync(kAll, flat);
    const double mean = sum / count;
    double squares = 0.0;
    for (int64_t i = begin + lane; i < n && ids[i] == id; i += 32) {
      const double gap = returns[order[i]] - mean;
      squares += gap * gap;
    }
    squares = __shfl_sync(kAll, sum_lanes(squares), 0);
    const double std = flat ? 0.0 : sqrt(squares / (count > 1.0 ? count - 1.0 : 1.0));
    for (int64_t i = begin + lane; i < n && ids[i] == id; i += 32) {
      const int64_t at = order[i];
      const double own_mean = flat ? returns[at] : mean;
      means[at] = own_mean, stds[at] = std;
      advantages[at] = group_advantage(kind, returns[at] - own_mean, std, count);
    }
  }
}

std::tuple<Tensor, Tensor, Tensor> group_advantages(Tensor returns, Tensor group_ids, int64_t kind) {
  check_groups(returns, group_ids, kind);
  const torch::stable::accelerator::DeviceGuard guard(returns.get_device_index());
  const Tensor from = compact(returns);
  std::array<StableIValue, 4> stack{torch::stable::detail::from(group_ids),
                                    torch::stable::detail::from(std::optional<bool>(true)),
                                    torch::stable::detail::from(int64_t{0}), torch::stable::detail::from(false)};
  TORCH_ERROR_CODE_CHECK(torch_call_dispatcher("aten::sort", "stable", stack.data(), TORCH_ABI_VERSION));
  const Tensor ids = torch::stable::detail::to<Tensor>(stack[0]), order = torch::stable::detail::to<Tensor>(stack[1]);
  Tensor advantages = torch::stable::empty_like(from), means = torch::stable::empty_like(from);
  Tensor stds = torch::stable::empty_like(from);
  const int64_t n = returns.numel();
  if (n == 0) return {advantages, means, stds};
  const auto grid = static_cast<unsigned>((n + kWalkers - 1) / kWalkers);
  groups_kernel<<<grid, kWalkers, 0, current_stream(returns)>>>(
      static_cast<const int64_t*>(ids.const_data_ptr()), static_cast<const int64_t*>(order.const_data_ptr()),
      static_cast<const double*>(from.const_data_ptr()), n, kind, static_cast<double*>(advantages.mutable_data_ptr()),
      static_cast<double*>(means.mutable_data_ptr()), static_cast<double*>(stds.mutable_data_ptr()));
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return {advantages, means, stds};
}

}  // namespace
}  // namespace megatron_rl

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CUDA, m) {
  m.impl("gae", TORCH_BOX(&megatron_rl::gae));
  m.impl("group_advantages", TORCH_BOX(&megatron_rl::group_advantages));
  m.impl("whiten", TORCH_BOX(&megatron_rl::whiten));
}

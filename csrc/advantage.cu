// Advantages on CUDA: one pass over the tokens, which reads each input once and writes each output once.
//
// The recurrence is that of advantage.cpp: a stretch of tokens is a step x -> m x + b, backwards in time, and m = -1
// says that a sequence ends within it, so that what comes in does not count. Each block takes a tile of tokens and
// composes its step. A block that needs what comes in from later tokens composes the steps of the tiles between, which
// other blocks have published (a decoupled look-back, Merrill and Garland 2016). Unlike there, the steps are composed
// in one order whatever is published first: those of the block's group of 32 tiles, then those of whole groups. So the
// same input has the same bits, and nothing waits for a chain of blocks. All arithmetic is float64. Blocks wait for
// blocks of lower numbers only, which the device starts first.

#include "advantage.cuh"

namespace megatron_rl {
namespace {

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

// A walk back over tokens, with the sequence that each is in. Used only if something is known of each sequence.
template <int N>
struct Cursor {
  int64_t sequence = 0;
  double decay[N];  // gamma times lambda
  bool counted = true;

  __device__ explicit Cursor(const Scan& s) {
    decay[0] = s.gamma * s.lam;
    if (N == 2) decay[N - 1] = s.gamma * s.critic_lam;
  }

  __device__ void read(const Scan& s) {
    if (s.lams) decay[0] = s.gamma * __ldg(s.lams + sequence);
    if (N == 2 && s.critic_lams) decay[N - 1] = s.gamma * __ldg(s.critic_lams + sequence);
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

__device__ Moments merge_lanes(Moments mine, int lanes) {
  for (int distance = 1; distance < lanes; distance *= 2) {
    const Moments other{__shfl_down_sync(kAll, mine.count, distance), __shfl_down_sync(kAll, mine.mean, distance),
                        __shfl_down_sync(kAll, mine.m2, distance)};
    mine = merge(mine, other);
  }
  return mine;
}

__device__ double sum_lanes(double mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) mine += __shfl_down_sync(kAll, mine, distance);
  return mine;
}

// Sums of a warp about a pivot, which is one of the advantages.
struct WarpSums {
  bool begun = false;
  float pivot = 0.0f;
  int count = 0;
  double sum = 0.0, squares = 0.0;

  __device__ void add(const float (&advantages)[kVec], unsigned counted) {
    if (!begun) {
      const unsigned lanes = __ballot_sync(kAll, counted != 0);
      if (lanes) {
        float first = 0.0f;
#pragma unroll
        for (int i = 0; i < kVec; i++) first = counted >> i & 1 ? advantages[i] : first;
        pivot = __shfl_sync(kAll, first, __ffs(lanes) - 1);
        begun = true;
      }
    }
    count += __popc(counted);
#pragma unroll
    for (int i = 0; i < kVec; i++) {
      const double difference = static_cast<double>(advantages[i]) - static_cast<double>(pivot);
      const double gap = counted >> i & 1 ? difference : 0.0;
      sum += gap;
      squares += gap * gap;
    }
  }

  __device__ Moments moments() const {
    const int whole = __reduce_add_sync(kAll, count);
    return about(pivot, whole, sum_lanes(sum), sum_lanes(squares));
  }
};

// Number of this block's share of sequences whose bounds or lambdas cannot be.
__device__ int faults_of(const Scan& s, int64_t place) {
  int faults = 0;
  for (int64_t i = place * kThreads + threadIdx.x; i < s.sequences; i += static_cast<int64_t>(gridDim.x) * kThreads) {
    if (s.cu) faults += s.cu[i] > s.cu[i + 1];
    if (s.lams) faults += !(s.lams[i] >= 0.0 && s.lams[i] <= 1.0);
    if (s.critic_lams) faults += !(s.critic_lams[i] >= 0.0 && s.critic_lams[i] <= 1.0);
  }
  if (place == 0 && threadIdx.x == 0 && s.cu) faults += s.cu[0] != 0 || s.cu[s.sequences] != s.tokens;
  return faults;
}

// By the block that ends last: the stats of all tiles, in one order. Sums are about the mean of the first tile that has
// one, so that nothing is divided before the end.
__device__ void write_stats(const Board& board, int64_t tiles, double* stats, double (*warp_sums)[kStats]) {
  __shared__ int first;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32, count = static_cast<int>(tiles);
  if (threadIdx.x == 0) first = count;
  __syncthreads();
  for (int i = threadIdx.x; i < count; i += kThreads) {
    if (__ldcg(board.sums + kStats * i) != 0.0) {
      atomicMin(&first, i);
      break;
    }
  }
  __syncthreads();
  const double pivot = first < count ? __ldcg(board.sums + kStats * first + 1) : 0.0;
  double mine[kStats] = {};  // count, sum, squares, stray rewards, faults
#pragma unroll 4
  for (int i = threadIdx.x; i < count; i += kThreads) {
    const double* sums = board.sums + kStats * i;
    const double size = __ldcg(sums), gap = size == 0.0 ? 0.0 : __ldcg(sums + 1) - pivot;
    mine[0] += size, mine[1] += size * gap, mine[2] += __ldcg(sums + 2) + size * gap * gap;
    mine[3] += __ldcg(sums + 3), mine[4] += __ldcg(sums + 4);
  }
#pragma unroll
  for (int k = 0; k < kStats; k++) mine[k] = sum_lanes(mine[k]);
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < kStats; k++) warp_sums[warp][k] = mine[k];
  }
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int i = 1; i < kWarps; i++) {
    for (int k = 0; k < kStats; k++) mine[k] += warp_sums[i][k];
  }
  const Moments whole = about(pivot, mine[0], mine[1], mine[2]);
  stats[0] = whole.count, stats[1] = whole.mean, stats[2] = whole.m2, stats[3] = mine[3], stats[4] = mine[4];
}

// A thread's tokens in registers. With KL terms rewards are float64: a float32 sum would not be exact.
template <class T, bool KL>
struct Loaded {
  using Reward = std::conditional_t<KL, double, float>;
  Reward rewards[kRows][kVec];
  float values[kRows][kVec];
  unsigned mask[kRows];
  int stray = 0;

  __device__ void load_row(const Scan& s, int row, int64_t at, bool fast) {
    const int64_t valid = s.tokens - at;
    float raw[kVec];
    load<T>(s.rewards, at, fast, valid, raw);
    if (s.values) load<T>(s.values, at, fast, valid, values[row]);
    mask[row] = load_mask(s.mask + at, fast, valid);
    float kl[kVec], ref[kVec];
    if (KL) {
      load<T>(s.kl, at, fast, valid, kl);
      if (s.ref) load<T>(s.ref, at, fast, valid, ref);
    }
#pragma unroll
    for (int i = 0; i < kVec; i++) {
      if (!s.values) values[row][i] = 0.0f;
      rewards[row][i] = raw[i];
      stray += raw[i] != 0.0f && !(mask[row] >> i & 1);
      if (KL) rewards[row][i] -= s.kl_coef * kl_term(s.kl_kind, kl[i], s.ref ? ref[i] : 0.0f);
    }
  }
};

// A walk back over the thread's tokens of a row, and its step. Most rows hold no end of a sequence: those have no
// branches, and m depends on the number of trained tokens alone.
template <class T, int N, bool KL>
__device__ Step<N> plain_step(const Scan& s, const Loaded<T, KL>& tokens, int row, const double (*powers)[kVec + 1]) {
  Step<N> step = nothing<N>();
  const unsigned mask = tokens.mask[row];
#pragma unroll
  for (int i = kVec - 1; i >= 0; i--) {
    const double value = tokens.values[row][i], delta = tokens.rewards[row][i] - value;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const double decay = powers[k][1], b = decay * step.b[k] + (s.gamma * value + decay * delta);
      step.b[k] = mask >> i & 1 ? b : step.b[k];
    }
  }
#pragma unroll
  for (int k = 0; k < N; k++) step.m[k] = powers[k][__popc(mask)];
  return step;
}

template <class T, int N, bool KL>
__device__ Step<N> step_with_ends(const Scan& s, const Loaded<T, KL>& tokens, int row, unsigned end, int64_t at,
                                  Cursor<N>& cursor, bool of_sequences) {
  Step<N> step = nothing<N>();
#pragma unroll
  for (int i = kVec - 1; i >= 0; i--) {
    if (end >> i & 1) {
#pragma unroll
      for (int k = 0; k < N; k++) step.m[k] = -1.0, step.b[k] = 0.0;
      if (of_sequences) cursor.back_to(s, at + i);
    }
    if (tokens.mask[row] >> i & 1) {
      const double value = tokens.values[row][i], delta = tokens.rewards[row][i] - value;
#pragma unroll
      for (int k = 0; k < N; k++) {
        step.m[k] *= cursor.decay[k];
        step.b[k] = cursor.decay[k] * step.b[k] + (s.gamma * value + cursor.decay[k] * delta);
      }
    }
  }
  return step;
}

// Advantages and returns of a row, and which of them count. x: what comes in.
template <class T, int N, bool KL>
__device__ unsigned plain_walk(const Scan& s, const Loaded<T, KL>& tokens, int row, const double (*powers)[kVec + 1],
                               double (&x)[N], float (&advantages)[kVec], float (&returns)[kVec]) {
  const unsigned mask = tokens.mask[row];
#pragma unroll
  for (int i = kVec - 1; i >= 0; i--) {
    const bool trained = mask >> i & 1;
    const double value = tokens.values[row][i], delta = tokens.rewards[row][i] - value;
    const float advantage = static_cast<float>(delta + x[0]);
    const float target = static_cast<float>(value + (delta + x[N - 1]));
    advantages[i] = trained ? advantage : 0.0f;
    returns[i] = trained ? target : 0.0f;
#pragma unroll
    for (int k = 0; k < N; k++) {
      const double decay = powers[k][1], next = decay * x[k] + (s.gamma * value + decay * delta);
      x[k] = trained ? next : x[k];
    }
  }
  return mask;
}

template <class T, int N, bool KL>
__device__ unsigned walk_with_ends(const Scan& s, const Loaded<T, KL>& tokens, int row, unsigned end, int64_t at,
                                   Cursor<N>& cursor, bool of_sequences, double (&x)[N], float (&advantages)[kVec],
                                   float (&returns)[kVec]) {
  unsigned counted = 0;
#pragma unroll
  for (int i = kVec - 1; i >= 0; i--) {
    if (end >> i & 1) {
#pragma unroll
      for (int k = 0; k < N; k++) x[k] = 0.0;
      if (of_sequences) cursor.back_to(s, at + i);
    }
    advantages[i] = 0.0f, returns[i] = 0.0f;
    if (tokens.mask[row] >> i & 1) {
      const double value = tokens.values[row][i], delta = tokens.rewards[row][i] - value;
      advantages[i] = static_cast<float>(delta + x[0]);
      returns[i] = static_cast<float>(value + (delta + x[N - 1]));
      counted |= (cursor.counted ? 1u : 0u) << i;
#pragma unroll
      for (int k = 0; k < N; k++) x[k] = cursor.decay[k] * x[k] + (s.gamma * value + cursor.decay[k] * delta);
    }
  }
  return counted;
}

// Blocks of a multiprocessor: what the registers allow without spills.
template <int N, bool KL>
constexpr int kResident = N == 1 && !KL ? 3 : 2;

template <class T, int N, bool KL>
__global__ void __launch_bounds__(kThreads, kResident<N, KL>)
    scan_kernel(const Scan s, const Board board, const int64_t tiles, const bool aligned) {
  __shared__ unsigned ends[kTile / 32];  // a bit for each token: the last of its sequence
  __shared__ Step<N> warp_steps[kWarps], after_warp[kWarps];
  __shared__ double carried[N], powers[N][kVec + 1];
  __shared__ int64_t bounds[2];
  __shared__ Moments warp_moments[kWarps];
  __shared__ double warp_counts[kWarps][2], warp_sums[kWarps][kStats];
  __shared__ bool is_last;
  const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const int64_t place = blockIdx.x, tile = tiles - 1 - place, begin = tile * kTile;
  const int mine = warp * kRows * 32 * kVec + lane * kVec;  // the thread's tokens of row 0, from `begin` on
  const bool fast = aligned && begin + kTile <= s.tokens;

  Loaded<T, KL> tokens;
#pragma unroll
  for (int row = 0; row < kRows; row++) tokens.load_row(s, row, begin + mine + row * 32 * kVec, fast);
  if (warp < 2) {
    const int64_t count = ended_by(s, begin + warp * kTile, lane);
    if (lane == 0) bounds[warp] = count;
  }
  for (int i = threadIdx.x; i < kTile / 32; i += kThreads) ends[i] = 0;
  if (threadIdx.x < N) {
    const double decay = s.gamma * (threadIdx.x == 0 ? s.lam : s.critic_lam);
    double power = 1.0;
    for (int i = 0; i <= kVec; i++, power *= decay) powers[threadIdx.x][i] = power;
  }
  const int faults = faults_of(s, place);
  __syncthreads();
  const int64_t first = bounds[0], last = bounds[1];
  for (int64_t i = first + threadIdx.x; i < last; i += kThreads) {
    const int64_t at = s.first(i + 1) - 1 - begin;
    if (at >= 0 && at < kTile) atomicOr(ends + at / 32, 1u << (at % 32));
  }
  __syncthreads();

  // Steps of the thread's rows, of rows of the warp, and of the warp.
  const bool of_sequences = s.sequences > 0 && (s.lams || s.critic_lams || s.kept);
  Step<N> after[kRows], row_step[kRows];
#pragma unroll
  for (int row = kRows - 1; row >= 0; row--) {
    const int at = mine + row * 32 * kVec;
    const unsigned end = ends[at / 32] >> (at % 32) & 0xffu;
    Step<N> step;
    if (end == 0 && !of_sequences) {
      step = plain_step<T, N, KL>(s, tokens, row, powers);
    } else {
      Cursor<N> cursor(s);
      if (of_sequences) cursor.start(s, begin + at + kVec - 1, first, last);
      step = step_with_ends<T, N, KL>(s, tokens, row, end, begin + at, cursor, of_sequences);
    }
    __syncwarp();
    step = steps_from_above(step, lane);
    row_step[row] = from_lane(step, 0);
    after[row] = from_above(step, 1);
    if (lane == 31) after[row] = nothing<N>();
  }
  Step<N> whole = row_step[kRows - 1];
#pragma unroll
  for (int row = kRows - 2; row >= 0; row--) whole = then(whole, row_step[row]);
  if (lane == 0) warp_steps[warp] = whole;
  __syncthreads();
  if (warp == 0) {
    Step<N> step = nothing<N>();
    if (lane < kWarps) step = warp_steps[lane];
    step = steps_from_above(step, lane);
    const Step<N> above = from_above(step, 1);
    if (lane < kWarps) after_warp[lane] = above;
    const bool closed = place == 0 || ends[kTile / 32 - 1] >> 31;
    look_back(board, place, from_lane(step, 0), closed, lane, carried);
  }
  __syncthreads();

  // Now all tokens.
  Step<N> in;
#pragma unroll
  for (int k = 0; k < N; k++) in.m[k] = -1.0, in.b[k] = carried[k];
  in = then(in, after_warp[warp]);
  WarpSums sums;
#pragma unroll
  for (int row = kRows - 1; row >= 0; row--) {
    const int at = mine + row * 32 * kVec;
    const unsigned end = ends[at / 32] >> (at % 32) & 0xffu;
    const Step<N> into = then(in, after[row]);
    double x[N];
#pragma unroll
    for (int k = 0; k < N; k++) x[k] = into.b[k];
    float advantages[kVec], returns[kVec];
    unsigned counted;
    if (end == 0 && !of_sequences) {
      counted = plain_walk<T, N, KL>(s, tokens, row, powers, x, advantages, returns);
    } else {
      Cursor<N> cursor(s);
      if (of_sequences) cursor.start(s, begin + at + kVec - 1, first, last);
      counted = walk_with_ends<T, N, KL>(s, tokens, row, end, begin + at, cursor, of_sequences, x, advantages, returns);
    }
    __syncwarp();
    const int64_t valid = s.tokens - begin - at;
    store(s.advantages + begin + at, fast, valid, advantages);
    if (s.returns) store(s.returns + begin + at, fast, valid, returns);
    sums.add(advantages, counted);
    in = then(in, row_step[row]);
  }

  // Statistics: of the warp, of the tile, and, in the block that ends last, of all.
  const Moments of_warp = sums.moments();
  const int stray = __reduce_add_sync(kAll, tokens.stray), bad = __reduce_add_sync(kAll, faults);
  if (lane == 0) warp_moments[warp] = of_warp, warp_counts[warp][0] = stray, warp_counts[warp][1] = bad;
  __syncthreads();
  if (warp == 0) {
    Moments of_tile{0.0, 0.0, 0.0};
    double counts[2] = {0.0, 0.0};
    if (lane < kWarps) of_tile = warp_moments[lane], counts[0] = warp_counts[lane][0], counts[1] = warp_counts[lane][1];
    of_tile = merge_lanes(of_tile, kWarps), counts[0] = sum_lanes(counts[0]), counts[1] = sum_lanes(counts[1]);
    if (lane == 0) {
      double* to = board.sums + kStats * tile;
      to[0] = of_tile.count, to[1] = of_tile.mean, to[2] = of_tile.m2, to[3] = counts[0], to[4] = counts[1];
      __threadfence();
      is_last = atomicAdd(board.done, 1) == tiles - 1;
    }
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  write_stats(board, tiles, s.stats, warp_sums);
}

cudaStream_t current_stream(const Tensor& one) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(one.get_device_index(), &stream));
  return static_cast<cudaStream_t>(stream);
}

bool is_aligned(const void* data, uintptr_t bytes) { return reinterpret_cast<uintptr_t>(data) % bytes == 0; }

template <class T, int N>
void launch(const Scan& s, const Board& board, int64_t tiles, bool aligned, cudaStream_t stream) {
  const auto grid = static_cast<unsigned>(tiles);
  if (s.kl_kind == kNoKl) scan_kernel<T, N, false><<<grid, kThreads, 0, stream>>>(s, board, tiles, aligned);
  else scan_kernel<T, N, true><<<grid, kThreads, 0, stream>>>(s, board, tiles, aligned);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
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
  const int64_t num_flags = tiles + groups + 1, num_doubles = 4 * (tiles + groups) + kStats * tiles;
  const Tensor flags = torch::stable::new_empty(p.stats, {&num_flags, 1}, ScalarType::Int);
  const Tensor doubles = torch::stable::new_empty(p.stats, {&num_doubles, 1}, ScalarType::Double);
  const cudaStream_t stream = current_stream(rewards);
  Board board;
  board.tile_ready = static_cast<int*>(flags.mutable_data_ptr());
  board.group_ready = board.tile_ready + tiles, board.done = board.group_ready + groups;
  board.tile_steps = static_cast<double*>(doubles.mutable_data_ptr());
  board.group_steps = board.tile_steps + 4 * tiles, board.sums = board.group_steps + 4 * groups;
  STD_CUDA_CHECK(cudaMemsetAsync(board.tile_ready, 0, num_flags * sizeof(int), stream));
  bool aligned = is_aligned(s.mask, 8) && is_aligned(s.advantages, 16) && is_aligned(s.returns, 16);
  for (const void* one : {s.rewards, s.values, s.kl, s.ref}) aligned = aligned && is_aligned(one, 16);
  const bool two = s.two || s.lams || s.critic_lams;
  if (s.half && two) launch<__nv_bfloat16, 2>(s, board, tiles, aligned, stream);
  else if (s.half) launch<__nv_bfloat16, 1>(s, board, tiles, aligned, stream);
  else if (two) launch<float, 2>(s, board, tiles, aligned, stream);
  else launch<float, 1>(s, board, tiles, aligned, stream);
  return p.results();
}

template <class T>
__global__ void whiten_kernel(const Scan s, const double* mean_std, const bool shift_mean, const bool aligned,
                              const void* values, float* to) {
  const int64_t at = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * kVec;
  const int64_t valid = s.tokens - at;
  if (valid <= 0) return;
  const bool fast = aligned && valid >= kVec;
  float row[kVec], whitened[kVec];
  load<T>(values, at, fast, valid, row);
  const unsigned mask = load_mask(s.mask + at, fast, valid);
  const double mean = __ldg(mean_std), scale = __ldg(mean_std + 1) + 1e-8, back = shift_mean ? 0.0 : mean;
  int64_t sequence = s.kept ? sequence_of(s, at, 0, s.sequences - 1) : 0;
#pragma unroll
  for (int i = 0; i < kVec; i++) {
    while (s.kept && sequence < s.sequences - 1 && s.first(sequence + 1) <= at + i) sequence++;
    const bool counted = (mask >> i & 1) && (!s.kept || __ldg(s.kept + sequence));
    whitened[i] = counted ? static_cast<float>((static_cast<double>(row[i]) - mean) / scale + back) : 0.0f;
  }
  store(to + at, fast, valid, whitened);
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
  const auto grid = static_cast<unsigned>((s.tokens + kThreads * kVec - 1) / (kThreads * kVec));
  float* to = static_cast<float*>(whitened.mutable_data_ptr());
  const void* data_from = from.const_data_ptr();
  const auto* moments = static_cast<const double*>(pair.const_data_ptr());
  const bool aligned = is_aligned(data_from, 16) && is_aligned(s.mask, 8) && is_aligned(to, 16);
  const cudaStream_t stream = current_stream(values);
  if (values.scalar_type() == ScalarType::Float)
    whiten_kernel<float><<<grid, kThreads, 0, stream>>>(s, moments, shift_mean, aligned, data_from, to);
  else whiten_kernel<__nv_bfloat16><<<grid, kThreads, 0, stream>>>(s, moments, shift_mean, aligned, data_from, to);
  STD_CUDA_KERNEL_LAUNCH_CHECK();
  return whitened;
}

// ids: sorted. order: where each was. A warp looks at 32 places, and computes the groups that begin there.
__global__ void groups_kernel(const int64_t* ids, const int64_t* order, const double* returns, int64_t n, int64_t kind,
                              double* advantages, double* means, double* stds) {
  const int lane = threadIdx.x % 32;
  const int64_t base = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) / 32 * 32, place = base + lane;
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
  const auto grid = static_cast<unsigned>((n + kThreads - 1) / kThreads);
  groups_kernel<<<grid, kThreads, 0, current_stream(returns)>>>(
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

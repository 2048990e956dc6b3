// What the CUDA kernels of advantages are made of: steps of the recurrence, the look-back over tiles, and the way of
// tokens through shared memory.
#pragma once

#define USE_CUDA  // declares the shim of the current stream
#include "advantage.h"

#include <cuda_bf16.h>
#include <cuda_runtime.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/macros.h>

namespace megatron_rl {
namespace {

constexpr int kWarps = 7, kWalkers = 32 * kWarps;  // warps of a block that walk over tokens
constexpr int kThreads = kWalkers + 32;            // and one that looks ahead
constexpr int kItems = 16;                         // tokens of a thread, which lie side by side
constexpr int kStretch = 8;                        // those of them that are in registers at a time
constexpr int kSpan = 32 * kItems;                 // tokens of a warp
constexpr int kTile = kWarps * kSpan;
constexpr int kGroup = 32;  // tiles whose steps are published together
constexpr unsigned kAll = 0xffffffffu, kItemBits = kAll >> (32 - kItems), kStretchBits = kAll >> (32 - kStretch);

// x -> m x + b for N lambdas. A sign bit in m, also that of -0, says that a sequence ends within, so that what comes in
// does not count. Products keep the bit, as no other m has one.
template <int N>
struct Step {
  double m[N], b[N];
};

template <int N>
__device__ Step<N> nothing() {
  Step<N> step;
#pragma unroll
  for (int k = 0; k < N; k++) step.m[k] = 1.0, step.b[k] = 0.0;
  return step;
}

template <int N>
__device__ bool is_closed(const Step<N>& step) {
  return __double2hiint(step.m[0]) < 0;
}

// The step over later tokens and then over earlier ones.
template <int N>
__device__ Step<N> then(const Step<N>& later, const Step<N>& earlier) {
  Step<N> both;
  const bool cut = is_closed(earlier);
#pragma unroll
  for (int k = 0; k < N; k++) {
    const double m = earlier.m[k] * later.m[k], b = earlier.m[k] * later.b[k] + earlier.b[k];
    both.m[k] = cut ? earlier.m[k] : m;
    both.b[k] = cut ? earlier.b[k] : b;
  }
  return both;
}

template <int N>
__device__ Step<N> from_lane(const Step<N>& step, int lane) {
  Step<N> other;
#pragma unroll
  for (int k = 0; k < N; k++) {
    other.m[k] = __shfl_sync(kAll, step.m[k], lane);
    other.b[k] = __shfl_sync(kAll, step.b[k], lane);
  }
  return other;
}

template <int N>
__device__ Step<N> from_above(const Step<N>& step, int distance) {
  Step<N> other;
#pragma unroll
  for (int k = 0; k < N; k++) {
    other.m[k] = __shfl_down_sync(kAll, step.m[k], distance);
    other.b[k] = __shfl_down_sync(kAll, step.b[k], distance);
  }
  return other;
}

// Of lane l: the steps of lanes 31 to l, if a lane's tokens come before those of the lane above.
template <int N>
__device__ Step<N> steps_from_above(Step<N> step, int lane) {
#pragma unroll
  for (int distance = 1; distance < 32; distance *= 2) {
    const Step<N> other = from_above(step, distance);
    if (lane + distance < 32) step = then(other, step);
  }
  return step;
}

// What blocks tell each other. All bytes are 0xff before the kernel starts: counters are -1, and messages not there.
struct Message {
  double m, b;
};

// Of some advantages: sums of the differences from one of them, and of their squares. The end alone divides.
struct Sums {
  double count, pivot, sum, squares;

  // The sums about another pivot.
  __device__ Sums about_pivot(double other) const {
    const double gap = count == 0.0 ? 0.0 : pivot - other;
    return {count, other, sum + count * gap, squares + gap * (2.0 * sum + count * gap)};
  }
};

struct Board {
  Message *tile_steps, *group_steps;  // N of each tile, and of each group
  unsigned long long *stray, *faults;
  int *tickets, *done;
  Sums* sums;  // of the advantages of each tile
};

// 16 bytes at once, so that no flag and no fence is needed.
__device__ void write_whole(Message* to, unsigned long long m, unsigned long long b) {
  asm volatile("{ .reg .b128 both; mov.b128 both, {%1, %2}; st.relaxed.gpu.global.b128 [%0], both; }"
               : : "l"(to), "l"(m), "l"(b) : "memory");
}

__device__ void read_whole(const Message* from, unsigned long long& m, unsigned long long& b) {
  asm volatile("{ .reg .b128 both; ld.relaxed.gpu.global.b128 both, [%2]; mov.b128 {%0, %1}, both; }"
               : "=l"(m), "=l"(b) : "l"(from) : "memory");
}

template <int N>
__device__ void publish(Message* to, int64_t at, const Step<N>& step) {
#pragma unroll
  for (int k = 0; k < N; k++) {
    const auto m = static_cast<unsigned long long>(__double_as_longlong(step.m[k]));
    // A lambda may be a NaN of these bits: then another NaN.
    write_whole(to + N * at + k, m == ~0ull ? m - 1 : m, __double_as_longlong(step.b[k]));
  }
}

template <int N>
__device__ bool is_there(const Message* from, int64_t at, Step<N>& step) {
  unsigned long long m[N], b[N];
  bool there = true;
#pragma unroll
  for (int k = 0; k < N; k++) {
    read_whole(from + N * at + k, m[k], b[k]);
    there = there && m[k] != ~0ull;
  }
#pragma unroll
  for (int k = 0; k < N && there; k++) {
    step.m[k] = __longlong_as_double(static_cast<long long>(m[k]));
    step.b[k] = __longlong_as_double(static_cast<long long>(b[k]));
  }
  return there;
}

// By one warp: the step of `count` tiles or groups, at most 32, of which `nearest` comes next in time and that before
// it after that. Waits for those up to an end of a sequence, as what is beyond does not count.
template <int N>
__device__ Step<N> wait_for(const Message* from, int64_t nearest, int64_t count, int lane) {
  Step<N> step = nothing<N>();
  bool there = lane >= count;
  while (true) {
    if (!there) there = is_there<N>(from, nearest - lane, step);
    const unsigned missing = __ballot_sync(kAll, !there), cuts = __ballot_sync(kAll, there && is_closed(step));
    const unsigned wanted = cuts ? cuts ^ (cuts - 1) : kAll;
    if ((missing & wanted) == 0) {
      if (!(wanted >> lane & 1)) step = nothing<N>();
      return from_lane(steps_from_above(step, lane), 0);
    }
    __nanosleep(20);
  }
}

// By one warp: publishes the tile's own step, and finds what comes in to its last token. place: number of the tile
// from the end of the data. closed: its last token ends a sequence, so nothing comes in.
template <int N>
__device__ void look_back(const Board& board, int64_t place, const Step<N>& own, bool closed, int lane,
                          double* carried) {
  const int64_t group = place / kGroup, inside = place % kGroup;
  const bool closes_group = inside == kGroup - 1;
  if (lane == 0 && !closes_group) publish(board.tile_steps, place, own);
  Step<N> total = nothing<N>();
  if (!closed || (closes_group && !is_closed(own))) total = wait_for<N>(board.tile_steps, place - 1, inside, lane);
  if (lane == 0 && closes_group) publish(board.group_steps, group, then(total, own));
  for (int64_t near = group - 1; !closed && near >= 0 && !is_closed(total); near -= 32)
    total = then(wait_for<N>(board.group_steps, near, near + 1, lane), total);
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < N; k++) carried[k] = closed ? 0.0 : total.b[k];
  }
}

// A warp's tokens of a column lie in shared memory, 4 bytes for each, in chunks of 16 bytes. They are put so that
// neither a thread's own chunks nor the chunks of one row of the warp meet in a bank. 8 tokens in bfloat16 lie where
// the first 4 of their results will.
__device__ int chunk_at(int chunk) { return 16 * (chunk ^ (chunk >> 3 & 7)); }

template <int Bytes>
__device__ void copy_async(void* to, const void* from) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], %2;"
               : : "r"(static_cast<unsigned>(__cvta_generic_to_shared(to))), "l"(from), "n"(Bytes) : "memory");
}

__device__ void wait_for_copies() { asm volatile("cp.async.wait_all;" : : : "memory"); }

// By a warp: its tokens of a column, from global memory; 0 from `valid` on. fast: all are there, and aligned.
template <class T>
__device__ void fetch(char* room, const void* column, int64_t at, bool fast, int64_t valid, int lane) {
  constexpr int kPer = 16 / sizeof(T), kStride = 4 / sizeof(T);
  const T* from = static_cast<const T*>(column) + at;
#pragma unroll
  for (int chunk = lane; chunk < kSpan / kPer; chunk += 32) {
    if (fast) copy_async<16>(room + chunk_at(kStride * chunk), from + chunk * kPer);
  }
#pragma unroll 1
  for (int i = lane; !fast && i < kSpan; i += 32)
    reinterpret_cast<T*>(room + chunk_at(i / kPer * kStride))[i % kPer] = i < valid ? from[i] : T{};
}

__device__ void fetch_mask(char* room, const uint8_t* mask, bool fast, int64_t valid, int lane) {
  if (fast) {
    copy_async<kItems>(room + kItems * lane, mask + kItems * lane);
    return;
  }
#pragma unroll 1
  for (int i = lane; i < kSpan; i += 32) room[i] = i < valid && mask[i];
}

// A stretch of tokens as float32. token: the first of them, from the warp's first on.
template <class T>
__device__ void take(const char* room, int token, float (&to)[kStretch]) {
  constexpr int kPer = 16 / sizeof(T);
#pragma unroll
  for (int j = 0; j < kStretch / kPer; j++) {
    const uint4 words = *reinterpret_cast<const uint4*>(room + chunk_at(token / 4 + j));
    const unsigned four[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (kPer == 4) {
        to[(4 * j + i) % kStretch] = __uint_as_float(four[i]);
      } else {
        to[2 * i] = __uint_as_float(four[i] << 16);
        to[2 * i + 1] = __uint_as_float(four[i] & 0xffff0000u);
      }
    }
  }
}

// Four bools as four bits.
__device__ unsigned bits_of(unsigned bools) {
  bools |= bools >> 4;
  bools |= bools >> 2;
  bools |= bools >> 1;
  return (bools & 0x01010101u) * 0x10204080u >> 28;
}

__device__ unsigned take_mask(const char* room, int lane) {
  const unsigned* words = reinterpret_cast<const unsigned*>(room + kItems * lane);
  unsigned bits = 0;
#pragma unroll
  for (int j = 0; j < kItems / 4; j++) bits |= bits_of(words[j]) << 4 * j;
  return bits;
}

// Results of a stretch of tokens into shared memory, from where the warp writes them in rows.
__device__ void give(char* room, int token, const float (&from)[kStretch]) {
#pragma unroll
  for (int j = 0; j < kStretch / 4; j++) {
    *reinterpret_cast<float4*>(room + chunk_at(token / 4 + j)) =
        make_float4(from[4 * j], from[4 * j + 1], from[4 * j + 2], from[4 * j + 3]);
  }
}

__device__ float result_at(const char* room, int token) {
  return reinterpret_cast<const float*>(room + chunk_at(token / 4))[token % 4];
}

__device__ void write_out(float* to, const char* room, bool fast, int64_t valid, int lane) {
  if (fast) {
#pragma unroll
    for (int chunk = lane; chunk < kSpan / 4; chunk += 32)
      reinterpret_cast<float4*>(to)[chunk] = *reinterpret_cast<const float4*>(room + chunk_at(chunk));
    return;
  }
#pragma unroll 1
  for (int i = lane; i < kSpan; i += 32) {
    if (i < valid) to[i] = result_at(room, i);
  }
}

// Columns of a tile in shared memory, as one warp sees them; results take the place of rewards and values.
struct Rooms {
  char *mask, *rewards;

  __device__ Rooms(char* rooms, int stage, int columns, int warp) {
    char* mine = rooms + stage * tile_bytes(columns);
    mask = mine + warp * kSpan, rewards = mine + kTile + warp * 4 * kSpan;
  }
  __host__ __device__ static int tile_bytes(int columns) { return kTile * (1 + 4 * columns); }
  __device__ char* values() const { return rewards + 4 * kTile; }
  __device__ char* kl() const { return rewards + 8 * kTile; }
  __device__ char* ref() const { return rewards + 12 * kTile; }
};

template <class T, bool KL>
__device__ void fetch_tile(const Scan& s, const Rooms& rooms, int64_t at, bool aligned, int lane) {
  const int64_t valid = s.tokens - at;
  const bool fast = aligned && valid >= kSpan;
  fetch_mask(rooms.mask, s.mask + at, fast, valid, lane);
  fetch<T>(rooms.rewards, s.rewards, at, fast, valid, lane);
  if (s.values) fetch<T>(rooms.values(), s.values, at, fast, valid, lane);
  if (KL) fetch<T>(rooms.kl(), s.kl, at, fast, valid, lane);
  if (KL && s.ref) fetch<T>(rooms.ref(), s.ref, at, fast, valid, lane);
}

// A stretch of a thread's tokens. With KL terms rewards are float64: a float32 sum would not be exact.
template <class T, bool KL>
struct Stretch {
  std::conditional_t<KL, double, float> rewards[kStretch];
  float values[kStretch];
  unsigned rewarded = 0;  // bits of the rewards that were not 0

  // token: the first one, from the warp's first on.
  __device__ Stretch(const Scan& s, const Rooms& rooms, int token) {
    float raw[kStretch], kl[kStretch], ref[kStretch];
    take<T>(rooms.rewards, token, raw);
    if (s.values) take<T>(rooms.values(), token, values);
    if (KL) take<T>(rooms.kl(), token, kl);
    if (KL && s.ref) take<T>(rooms.ref(), token, ref);
#pragma unroll
    for (int i = 0; i < kStretch; i++) {
      if (!s.values) values[i] = 0.0f;
      rewarded |= (raw[i] != 0.0f ? 1u : 0u) << i;
      rewards[i] = raw[i];
      if (KL) rewards[i] -= s.kl_coef * kl_term(s.kl_kind, kl[i], s.ref ? ref[i] : 0.0f);
    }
  }
};

}  // namespace
}  // namespace megatron_rl

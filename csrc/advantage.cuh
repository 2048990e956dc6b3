// What the CUDA kernels of advantages are made of: steps of the recurrence, the look-back over tiles, loads and stores.
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

constexpr int kThreads = 256, kWarps = kThreads / 32;
constexpr int kVec = 8;   // tokens of a thread in a row, which lie side by side
constexpr int kRows = 2;  // rows of a warp
constexpr int kTile = kThreads * kVec * kRows;
constexpr int kGroup = 32;  // tiles whose steps are published together
constexpr unsigned kAll = 0xffffffffu;

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

// What blocks tell each other. Flags are 0 before the kernel starts.
struct Board {
  int *tile_ready, *group_ready, *done;
  double *tile_steps, *group_steps;  // 4 numbers each
  double* sums;                      // [tiles, 5], as the stats
};

__device__ int load_acquire(const int* flag) {
  int value;
  asm volatile("ld.acquire.gpu.global.s32 %0, [%1];" : "=r"(value) : "l"(flag) : "memory");
  return value;
}

__device__ void store_release(int* flag, int value) {
  asm volatile("st.release.gpu.global.s32 [%0], %1;" : : "l"(flag), "r"(value) : "memory");
}

template <int N>
__device__ void publish(double* steps, int* ready, int64_t at, const Step<N>& step) {
#pragma unroll
  for (int k = 0; k < N; k++) steps[4 * at + 2 * k] = step.m[k], steps[4 * at + 2 * k + 1] = step.b[k];
  store_release(ready + at, 1);
}

template <int N>
__device__ Step<N> wait_for(const double* steps, const int* ready, int64_t at) {
  while (!load_acquire(ready + at)) __nanosleep(20);
  Step<N> step;
#pragma unroll
  for (int k = 0; k < N; k++) {
    step.m[k] = __ldcg(steps + 4 * at + 2 * k);
    step.b[k] = __ldcg(steps + 4 * at + 2 * k + 1);
  }
  return step;
}

// By one warp: publishes the tile's own step, and finds what comes in to its last token. place: number of the tile
// from the end of the data. closed: its last token ends a sequence, so nothing comes in.
template <int N>
__device__ void look_back(const Board& board, int64_t place, const Step<N>& own, bool closed, int lane,
                          double* carried) {
  const int64_t group = place / kGroup;
  const int inside = static_cast<int>(place % kGroup);
  const bool closes_group = inside == kGroup - 1;
  if (lane == 0 && !closes_group) publish(board.tile_steps, board.tile_ready, place, own);
  Step<N> total = nothing<N>();
  if (!closed || (closes_group && !is_closed(own))) {
    if (lane < inside) total = wait_for<N>(board.tile_steps, board.tile_ready, group * kGroup + lane);
    // A lane's tokens come after those of the lane above.
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
      const Step<N> other = from_above(total, distance);
      if (lane + distance < 32) total = then(total, other);
    }
    total = from_lane(total, 0);
  }
  if (lane == 0 && closes_group) publish(board.group_steps, board.group_ready, group, then(total, own));
  for (int64_t near = group - 1; !closed && near >= 0 && !is_closed(total); near -= 32) {
    Step<N> window = nothing<N>();
    if (lane <= near) window = wait_for<N>(board.group_steps, board.group_ready, near - lane);
    window = steps_from_above(window, lane);
    total = then(from_lane(window, 0), total);
  }
  if (lane == 0) {
#pragma unroll
    for (int k = 0; k < N; k++) carried[k] = closed ? 0.0 : total.b[k];
  }
}

// Tokens at..at+8 as float32, 0 from `valid` on.
template <class T>
__device__ void load(const void* data, int64_t at, bool fast, int64_t valid, float (&to)[kVec]);

template <>
__device__ void load<float>(const void* data, int64_t at, bool fast, int64_t valid, float (&to)[kVec]) {
  const float* from = static_cast<const float*>(data) + at;
  if (fast) {
    const float4* vectors = reinterpret_cast<const float4*>(from);
    const float4 low = __ldg(vectors), high = __ldg(vectors + 1);
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i++) to[i] = i < valid ? __ldg(from + i) : 0.0f;
  }
}

template <>
__device__ void load<__nv_bfloat16>(const void* data, int64_t at, bool fast, int64_t valid, float (&to)[kVec]) {
  const unsigned short* from = static_cast<const unsigned short*>(data) + at;
  if (fast) {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(from));
    const unsigned pairs[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      to[2 * i] = __uint_as_float(pairs[i] << 16);
      to[2 * i + 1] = __uint_as_float(pairs[i] & 0xffff0000u);
    }
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i++) {
      to[i] = i < valid ? __uint_as_float(static_cast<unsigned>(__ldg(from + i)) << 16) : 0.0f;
    }
  }
}

// Four bools as four bits.
__device__ unsigned bits_of(unsigned bools) {
  bools |= bools >> 4;
  bools |= bools >> 2;
  bools |= bools >> 1;
  return ((bools & 0x01010101u) * 0x10204080u) >> 28;
}

__device__ unsigned load_mask(const uint8_t* mask, bool fast, int64_t valid) {
  if (fast) {
    const uint2 bools = __ldg(reinterpret_cast<const uint2*>(mask));
    return bits_of(bools.x) | bits_of(bools.y) << 4;
  }
  unsigned bits = 0;
#pragma unroll
  for (int i = 0; i < kVec; i++) bits |= (i < valid && __ldg(mask + i) ? 1u : 0u) << i;
  return bits;
}

__device__ void store(float* to, bool fast, int64_t valid, const float (&from)[kVec]) {
  if (fast) {
    reinterpret_cast<float4*>(to)[0] = make_float4(from[0], from[1], from[2], from[3]);
    reinterpret_cast<float4*>(to)[1] = make_float4(from[4], from[5], from[6], from[7]);
  } else {
#pragma unroll
    for (int i = 0; i < kVec; i++) {
      if (i < valid) to[i] = from[i];
    }
  }
}

}  // namespace
}  // namespace megatron_rl

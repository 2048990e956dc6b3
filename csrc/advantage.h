// What the CPU and the CUDA kernels of advantages have in common: arguments, their checks, and sums that can be merged.
// Letters: T tokens, S sequences. Only torch's stable ABI is used, so that one build serves later versions of torch.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <cmath>
#include <cstdint>
#include <optional>
#include <tuple>

#ifdef __CUDACC__
#define MRL_BOTH __host__ __device__ __forceinline__
#else
#define MRL_BOTH inline
#endif

namespace megatron_rl {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

// The term of the KL penalty that is taken off each trained token's reward. Numbers as in
// megatron_rl/ops/advantages.py.
enum KlKind : int64_t { kNoKl = 0, kGiven = 1, kK1 = 2, kK2 = 3, kK3 = 4, kAbs = 5 };

// As in megatron_rl/algos/kl.py, cuts of k3 included. Comparisons are written so that NaN passes.
MRL_BOTH double kl_term(int64_t kind, double logprob, double ref) {
  const double gap = logprob - ref;
  switch (kind) {
    case kK1: return gap;
    case kK2: return 0.5 * gap * gap;
    case kK3: {
      double ratio = -gap;
      ratio = ratio > 20.0 ? 20.0 : ratio < -20.0 ? -20.0 : ratio;
      const double term = expm1(ratio) - ratio;
      return term > 10.0 ? 10.0 : term;
    }
    case kAbs: return fabs(gap);
    default: return logprob;  // kGiven: the terms themselves
  }
}

// Count, mean and sum of squared differences from the mean. Merging is Chan et al. 1979; equal values stay exact.
struct Moments {
  double count, mean, m2;
};

MRL_BOTH Moments merge(const Moments& a, const Moments& b) {
  if (b.count == 0.0) return a;
  if (a.count == 0.0) return b;
  const double count = a.count + b.count, gap = b.mean - a.mean, share = b.count / count;
  return {count, a.mean + gap * share, a.m2 + b.m2 + gap * gap * a.count * share};
}

// From sums about a pivot. If the pivot is one of the values, at most log2(count) bits cancel.
MRL_BOTH Moments about(double pivot, double count, double sum, double squares) {
  if (count == 0.0) return {0.0, 0.0, 0.0};
  const double shift = sum / count, m2 = squares - sum * shift;
  return {count, pivot + shift, m2 < 0.0 ? 0.0 : m2};
}

// What one call of gae reads and writes. Pointers are to contiguous memory of one device.
struct Scan {
  int64_t tokens, sequences;
  int64_t length;     // of each row of a padded batch; 0 if packed
  const int64_t* cu;  // [S + 1] first token of each sequence; null if padded
  bool half;          // rewards, values, kl and ref are bfloat16, else float32
  const void *rewards, *values, *kl, *ref;  // [T]; values, kl and ref may be null
  const uint8_t *mask, *kept;               // [T], [S]; kept may be null
  const double *lams, *critic_lams;         // [S]; null: lam, critic_lam
  int64_t kl_kind;
  double kl_coef, gamma, lam, critic_lam;
  bool two;  // the critic's lambda is another one
  float *advantages, *returns;  // [T]; returns is null without values
  double* stats;                // [5], see kStats

  MRL_BOTH int64_t first(int64_t sequence) const { return cu ? cu[sequence] : sequence * length; }
};

// stats of gae: count, mean and m2 of the advantages of trained tokens of kept sequences; rewards that lie on tokens
// which are not trained; faults of cu_seqlens and lambdas.
constexpr int64_t kStats = 5;

// A Scan and the tensors that its pointers belong to.
struct Prepared {
  Scan scan;
  Tensor rewards, mask, advantages, returns, stats;
  MaybeTensor values, kl, ref, cu, kept, lams, critic_lams;

  std::tuple<Tensor, Tensor, Tensor> results() const { return {advantages, returns, stats}; }
};

// A call through the dispatcher costs more than a kernel's launch, so it is made where it does something.
inline Tensor compact(const Tensor& one) { return one.is_contiguous() ? one : torch::stable::contiguous(one); }

inline MaybeTensor compact(const MaybeTensor& one) {
  return one.has_value() ? MaybeTensor(compact(*one)) : std::nullopt;
}

inline Tensor as_float(const Tensor& one) {
  return one.scalar_type() == ScalarType::Float ? one : torch::stable::to(one, ScalarType::Float);
}

template <class T = void>
const T* data(const MaybeTensor& one) {
  return one.has_value() ? static_cast<const T*>(one->const_data_ptr()) : nullptr;
}

// Rewards, values and log-probabilities are all float32 or all bfloat16 for a kernel; a mix becomes float32.
inline bool all_half(const Tensor& rewards, std::initializer_list<const MaybeTensor*> others) {
  bool half = rewards.scalar_type() == ScalarType::BFloat16;
  for (const MaybeTensor* one : others)
    half = half && (!one->has_value() || (*one)->scalar_type() == ScalarType::BFloat16);
  return half;
}

inline void check_like(const Tensor& rewards, const MaybeTensor& one, const char* name) {
  if (!one.has_value()) return;
  STD_TORCH_CHECK(one->dim() == rewards.dim(), name, " must have the shape of rewards");
  for (int64_t i = 0; i < rewards.dim(); i++)
    STD_TORCH_CHECK(one->size(i) == rewards.size(i), name, " must have the shape of rewards");
  STD_TORCH_CHECK(one->is_cuda() == rewards.is_cuda() && one->get_device_index() == rewards.get_device_index(),
                  name, " must be on the device of rewards");
}

inline void check_floats(const Tensor& one, const char* name) {
  STD_TORCH_CHECK(one.scalar_type() == ScalarType::Float || one.scalar_type() == ScalarType::BFloat16, name,
                  " must be float32 or bfloat16");
}

inline void check_of_sequences(const Tensor& rewards, const MaybeTensor& one, int64_t size, ScalarType dtype,
                               const char* name) {
  if (!one.has_value()) return;
  STD_TORCH_CHECK(one->dim() == 1 && one->numel() == size && one->scalar_type() == dtype, name,
                  " must have one dimension, an entry for each sequence, and its dtype: int64 for cu_seqlens, bool for "
                  "kept, float64 for lambdas");
  STD_TORCH_CHECK(one->is_cuda() == rewards.is_cuda() && one->get_device_index() == rewards.get_device_index(),
                  name, " must be on the device of rewards");
}

inline Prepared prepare(const Tensor& rewards, const MaybeTensor& values, const Tensor& mask, const MaybeTensor& cu,
                        const MaybeTensor& kept, const MaybeTensor& kl, const MaybeTensor& ref, int64_t kl_kind,
                        double kl_coef, double gamma, double lam, double critic_lam, const MaybeTensor& lams,
                        const MaybeTensor& critic_lams) {
  STD_TORCH_CHECK(rewards.dim() == (cu.has_value() ? 1 : 2),
                  "rewards must be [T] with cu_seqlens, [batch, time] without");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "mask must be bool");
  STD_TORCH_CHECK(kl_kind >= kNoKl && kl_kind <= kAbs, "kl_kind is not known");
  STD_TORCH_CHECK((kl_kind != kNoKl) == kl.has_value() && (kl_kind > kGiven) == ref.has_value(),
                  "kl_kind needs log-probabilities: none for 0, kl for 1, kl and ref for 2 to 5");
  STD_TORCH_CHECK(0.0 <= gamma && gamma <= 1.0 && 0.0 <= lam && lam <= 1.0 && 0.0 <= critic_lam && critic_lam <= 1.0,
                  "gamma and lambdas must be from 0 to 1");
  for (const auto& [one, name] : {std::pair{&values, "values"}, {&kl, "kl"}, {&ref, "ref"}}) {
    check_like(rewards, *one, name);
    if (one->has_value()) check_floats(**one, name);
  }
  check_floats(rewards, "rewards");
  check_like(rewards, mask, "mask");
  const int64_t sequences = cu.has_value() ? cu->numel() - 1 : rewards.size(0);
  STD_TORCH_CHECK(sequences >= 0 && (sequences > 0 || rewards.numel() == 0),
                  "cu_seqlens must hold 0 and the end of each sequence");
  check_of_sequences(rewards, cu, sequences + 1, ScalarType::Long, "cu_seqlens");
  check_of_sequences(rewards, kept, sequences, ScalarType::Bool, "kept");
  check_of_sequences(rewards, lams, sequences, ScalarType::Double, "lams");
  check_of_sequences(rewards, critic_lams, sequences, ScalarType::Double, "critic_lams");

  const bool half = all_half(rewards, {&values, &kl, &ref});
  const auto ready = [half](const Tensor& one) { return compact(half ? one : as_float(one)); };
  const auto maybe = [&ready](const MaybeTensor& one) { return one.has_value() ? MaybeTensor(ready(*one)) : one; };
  Prepared p;
  p.rewards = ready(rewards);
  p.mask = compact(mask);
  p.values = maybe(values), p.kl = maybe(kl), p.ref = maybe(ref);
  p.cu = compact(cu), p.kept = compact(kept), p.lams = compact(lams), p.critic_lams = compact(critic_lams);
  p.advantages = torch::stable::new_empty(p.rewards, rewards.sizes(), ScalarType::Float);
  const int64_t none = 0, five = kStats;
  p.returns = values.has_value() ? torch::stable::new_empty(p.rewards, rewards.sizes(), ScalarType::Float)
                                 : torch::stable::new_empty(p.rewards, {&none, 1}, ScalarType::Float);
  p.stats = torch::stable::new_empty(p.rewards, {&five, 1}, ScalarType::Double);
  Scan& s = p.scan;
  s.tokens = rewards.numel(), s.sequences = sequences, s.length = cu.has_value() ? 0 : rewards.size(1);
  s.cu = data<int64_t>(p.cu), s.half = half;
  s.rewards = p.rewards.const_data_ptr(), s.values = data(p.values), s.kl = data(p.kl), s.ref = data(p.ref);
  s.mask = static_cast<const uint8_t*>(p.mask.const_data_ptr()), s.kept = data<uint8_t>(p.kept);
  s.lams = data<double>(p.lams), s.critic_lams = data<double>(p.critic_lams);
  s.kl_kind = kl_kind, s.kl_coef = kl_coef, s.gamma = gamma, s.lam = lam, s.critic_lam = critic_lam;
  s.two = values.has_value() && (s.lams || s.critic_lams || lam != critic_lam);
  s.advantages = static_cast<float*>(p.advantages.mutable_data_ptr());
  s.returns = values.has_value() ? static_cast<float*>(p.returns.mutable_data_ptr()) : nullptr;
  s.stats = static_cast<double*>(p.stats.mutable_data_ptr());
  return p;
}

// Kinds of group_advantages. Numbers as in megatron_rl/ops/advantages.py.
enum GroupKind : int64_t { kMean = 0, kStd = 1, kLeaveOneOut = 2 };

MRL_BOTH double group_advantage(int64_t kind, double above_mean, double std, double count) {
  switch (kind) {
    case kStd: return above_mean / (std + 1e-6);
    case kLeaveOneOut: return above_mean * (count / (count > 1.0 ? count - 1.0 : 1.0));
    default: return above_mean;
  }
}

inline void check_groups(const Tensor& returns, const Tensor& group_ids, int64_t kind) {
  STD_TORCH_CHECK(returns.dim() == 1 && returns.scalar_type() == ScalarType::Double, "returns must be [S] float64");
  STD_TORCH_CHECK(group_ids.dim() == 1 && group_ids.scalar_type() == ScalarType::Long &&
                      group_ids.numel() == returns.numel(), "group_ids must be [S] int64");
  STD_TORCH_CHECK(kind >= kMean && kind <= kLeaveOneOut, "kind of group advantage is not known");
}

inline void check_whiten(const Tensor& values, const Tensor& mask, const MaybeTensor& cu, const MaybeTensor& kept,
                         const Tensor& mean_std) {
  STD_TORCH_CHECK(values.dim() == (cu.has_value() ? 1 : 2),
                  "values must be [T] with cu_seqlens, [batch, time] without");
  check_floats(values, "values");
  STD_TORCH_CHECK(mask.scalar_type() == ScalarType::Bool, "mask must be bool");
  check_like(values, mask, "mask");
  const int64_t sequences = cu.has_value() ? cu->numel() - 1 : values.size(0);
  STD_TORCH_CHECK(sequences >= 0 && (sequences > 0 || values.numel() == 0),
                  "cu_seqlens must hold 0 and the end of each sequence");
  check_of_sequences(values, cu, sequences + 1, ScalarType::Long, "cu_seqlens");
  check_of_sequences(values, kept, sequences, ScalarType::Bool, "kept");
  check_of_sequences(values, mean_std, 2, ScalarType::Double, "mean_std");
}

}  // namespace megatron_rl

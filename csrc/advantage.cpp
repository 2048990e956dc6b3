// Advantages on CPUs, and the schemas of megatron_rl's operators. See megatron_rl/ops/advantages.py for what they mean.
//
// GAE is a linear recurrence backwards over the trained tokens t of a sequence. With x_t = gamma V_{t+1} + gamma lam
// A_{t+1}, 0 at the end: A_t = r_t - V_t + x_t, and x_{t-1} = gamma V_t + gamma lam (r_t - V_t) + gamma lam x_t. A
// stretch of tokens is thus one pair (m, b): x -> m x + b. Chunks of a fixed number of tokens are computed in parallel:
// first the pairs of those that begin within a sequence, then what goes into each, then all tokens. Everything is
// float64, and neither threads nor vector widths change the order of any sum, so results have the same bits always.

#include "advantage.h"

#include <algorithm>
#include <bit>
#include <vector>

// The same loops for wider vectors, picked when the library is loaded. No contraction to fused products (setup.py), so
// that all give the same bits.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define MRL_WIDE __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define MRL_WIDE
#endif

namespace megatron_rl {
namespace {

constexpr int64_t kChunk = 16384;  // tokens that are one unit of work
constexpr int kBlock = 256;        // tokens whose intermediate values stay in the first cache
constexpr int kLanes = 8;          // sums that are kept apart, for vectors

// Which tokens are trained, as bits of the numbers' own width, all or none: a number that is not trained becomes 0 by
// "and", also NaN, and loops have no branches.
struct Keep {
  int64_t wide[kBlock];
  int32_t narrow[kBlock];
};

struct Block {
  float rewards[kBlock], values[kBlock], kl[kBlock], ref[kBlock];
  double delta[kBlock], m[kBlock], b[kBlock], x[kBlock], critic_m[kBlock], critic_b[kBlock], critic_x[kBlock];
  Keep keep;
};

MRL_WIDE void widen(const uint16_t* __restrict from, float* __restrict to, int n) {
  for (int i = 0; i < n; i++) to[i] = std::bit_cast<float>(static_cast<uint32_t>(from[i]) << 16);
}

// Tokens from..from+n as float32: where they are, or widened into `room`.
const float* floats(const void* data, bool half, int64_t from, int n, float* room) {
  if (!half) return static_cast<const float*>(data) + from;
  widen(static_cast<const uint16_t*>(data) + from, room, n);
  return room;
}

MRL_WIDE void make_keep(const uint8_t* __restrict mask, Keep& __restrict keep, int n) {
  for (int i = 0; i < n; i++) keep.wide[i] = -static_cast<int64_t>(mask[i] != 0);
  for (int i = 0; i < n; i++) keep.narrow[i] = -static_cast<int32_t>(mask[i] != 0);
}

double only(double number, int64_t keep) { return std::bit_cast<double>(std::bit_cast<int64_t>(number) & keep); }

float only(float number, int32_t keep) { return std::bit_cast<float>(std::bit_cast<int32_t>(number) & keep); }

MRL_WIDE void make_deltas(const float* __restrict rewards, const float* __restrict values, double* __restrict delta,
                          int n) {
  for (int i = 0; i < n; i++) delta[i] = static_cast<double>(rewards[i]) - static_cast<double>(values[i]);
}

MRL_WIDE void make_steps(const double* __restrict delta, const float* __restrict values,
                         const int64_t* __restrict keep, double gamma, double decay, double* __restrict m,
                         double* __restrict b, int n) {
  const int64_t one = std::bit_cast<int64_t>(1.0), bits = std::bit_cast<int64_t>(decay);
  for (int i = 0; i < n; i++) m[i] = std::bit_cast<double>((bits & keep[i]) | (one & ~keep[i]));
  for (int i = 0; i < n; i++) b[i] = only(gamma * static_cast<double>(values[i]) + decay * delta[i], keep[i]);
}

double chain(const double* __restrict m, const double* __restrict b, double carried, double* __restrict x, int n) {
  for (int i = n - 1; i >= 0; i--) {
    x[i] = carried;
    carried = m[i] * carried + b[i];
  }
  return carried;
}

MRL_WIDE void write_sums(const double* __restrict one, const double* __restrict other, const int32_t* __restrict keep,
                         float* __restrict to, int n) {
  for (int i = 0; i < n; i++) to[i] = only(static_cast<float>(one[i] + other[i]), keep[i]);
}

MRL_WIDE void write_returns(const float* __restrict values, const double* __restrict delta, const double* __restrict x,
                            const int32_t* __restrict keep, float* __restrict to, int n) {
  for (int i = 0; i < n; i++)
    to[i] = only(static_cast<float>(static_cast<double>(values[i]) + (delta[i] + x[i])), keep[i]);
}

// Rewards that are not 0 on tokens that are not trained.
MRL_WIDE int64_t count_stray(const float* __restrict rewards, const int32_t* __restrict keep, int n) {
  int32_t stray = 0;
  for (int i = 0; i < n; i++) stray += static_cast<int32_t>(rewards[i] != 0.0f) & ~keep[i];
  return stray;
}

// Sums about a pivot, which is the first value that is counted.
struct PivotSums {
  bool begun = false;
  double pivot = 0.0, count = 0.0, sum[kLanes] = {}, squares[kLanes] = {};

  void add(const float* values, const Keep& keep, int n) {
    for (int i = n - 1; i >= 0 && !begun; i--) {
      if (keep.narrow[i]) begun = true, pivot = values[i];
    }
    if (begun) count += add_block(values, keep, n, pivot, sum, squares);
  }

  MRL_WIDE static int64_t add_block(const float* __restrict values, const Keep& __restrict keep, int n, double pivot,
                                    double* __restrict sum, double* __restrict squares) {
    double gaps[kBlock], total[kLanes], square[kLanes];
    int32_t count = 0;
    for (int i = 0; i < n; i++) gaps[i] = only(static_cast<double>(values[i]) - pivot, keep.wide[i]);
    for (int i = 0; i < n; i++) count -= keep.narrow[i];
    for (int j = 0; j < kLanes; j++) total[j] = sum[j], square[j] = squares[j];
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      for (int j = 0; j < kLanes; j++) total[j] += gaps[i + j];
      for (int j = 0; j < kLanes; j++) square[j] += gaps[i + j] * gaps[i + j];
    }
    for (int j = 0; i + j < n; j++) total[j] += gaps[i + j], square[j] += gaps[i + j] * gaps[i + j];
    for (int j = 0; j < kLanes; j++) sum[j] = total[j], squares[j] = square[j];
    return count;
  }

  Moments moments() const {
    double total = 0.0, square = 0.0;
    for (int j = 0; j < kLanes; j++) total += sum[j], square += squares[j];
    return about(pivot, count, total, square);
  }
};

struct Lambdas {
  double policy, critic;  // times gamma
};

Lambdas decays(const Scan& s, int64_t sequence) {
  const double lam = s.lams ? s.lams[sequence] : s.lam;
  const double critic = s.critic_lams ? s.critic_lams[sequence] : s.critic_lam;
  return {s.gamma * lam, s.gamma * critic};
}

// Fills a block from tokens `from` on; the values it stands on (zeros if there is no critic).
const float* load(const Scan& s, int64_t from, int n, const Lambdas& decay, Block& block) {
  const uint8_t* mask = s.mask + from;
  const float* rewards = floats(s.rewards, s.half, from, n, block.rewards);
  if (!s.values) std::fill_n(block.values, n, 0.0f);
  const float* values = s.values ? floats(s.values, s.half, from, n, block.values) : block.values;
  make_keep(mask, block.keep, n);
  make_deltas(rewards, values, block.delta, n);
  if (s.kl_kind != kNoKl) {
    const float* kl = floats(s.kl, s.half, from, n, block.kl);
    const float* ref = s.ref ? floats(s.ref, s.half, from, n, block.ref) : kl;
    for (int i = 0; i < n; i++) {
      if (mask[i]) block.delta[i] -= s.kl_coef * kl_term(s.kl_kind, kl[i], ref[i]);
    }
  }
  make_steps(block.delta, values, block.keep.wide, s.gamma, decay.policy, block.m, block.b, n);
  if (s.two) make_steps(block.delta, values, block.keep.wide, s.gamma, decay.critic, block.critic_m, block.critic_b, n);
  return values;
}

// x -> m x + b, for policy and critic. Closed: the end of the sequence is inside, and m does not count.
struct Pair {
  double m = 1.0, b = 0.0, critic_m = 1.0, critic_b = 0.0;
  bool closed = false;
};

struct Carried {
  double x = 0.0, critic_x = 0.0;
};

void fold(const double* m, const double* b, int n, double& whole_m, double& whole_b) {
  for (int i = n - 1; i >= 0; i--) {
    // Kept above 0 unless lambda is 0, so that an infinity stays one however far it is carried.
    const double product = m[i] * whole_m;
    whole_m = product == 0.0 && m[i] > 0.0 && whole_m > 0.0 ? 5e-324 : product;
    whole_b = m[i] * whole_b + b[i];
  }
}

// The pair of the tokens from `begin` to `end`, which are of one sequence.
Pair pair_of(const Scan& s, int64_t sequence, int64_t begin, int64_t end, bool closed) {
  Block block;
  Pair pair;
  pair.closed = closed;
  const Lambdas decay = decays(s, sequence);
  for (int64_t stop = end; stop > begin; stop -= kBlock) {
    const int64_t from = std::max(begin, stop - kBlock);
    const int n = static_cast<int>(stop - from);
    load(s, from, n, decay, block);
    fold(block.m, block.b, n, pair.m, pair.b);
    if (s.two) fold(block.critic_m, block.critic_b, n, pair.critic_m, pair.critic_b);
  }
  return pair;
}

struct ChunkSums {
  Moments moments{0.0, 0.0, 0.0};
  int64_t stray = 0;
};

// The tokens from `begin` to `end`, of one sequence; what is carried goes in at the end and out at the beginning.
void sweep(const Scan& s, int64_t sequence, int64_t begin, int64_t end, Carried& carried, Block& block,
           PivotSums& sums, int64_t& stray) {
  const Lambdas decay = decays(s, sequence);
  const bool counted = !s.kept || s.kept[sequence];
  for (int64_t stop = end; stop > begin; stop -= kBlock) {
    const int64_t from = std::max(begin, stop - kBlock);
    const int n = static_cast<int>(stop - from);
    const float* values = load(s, from, n, decay, block);
    const int32_t* keep = block.keep.narrow;
    stray += count_stray(s.half ? block.rewards : static_cast<const float*>(s.rewards) + from, keep, n);
    carried.x = chain(block.m, block.b, carried.x, block.x, n);
    if (s.two) carried.critic_x = chain(block.critic_m, block.critic_b, carried.critic_x, block.critic_x, n);
    write_sums(block.delta, block.x, keep, s.advantages + from, n);
    const double* critic_x = s.two ? block.critic_x : block.x;
    if (s.returns) write_returns(values, block.delta, critic_x, keep, s.returns + from, n);
    if (counted) sums.add(s.advantages + from, block.keep, n);
  }
}

// The sequence that token t is in.
int64_t sequence_of(const Scan& s, int64_t token) {
  if (!s.cu) return token / s.length;
  return std::upper_bound(s.cu, s.cu + s.sequences + 1, token) - s.cu - 1;
}

void check_sequences(const Scan& s) {
  if (s.cu) {
    STD_TORCH_CHECK(s.cu[0] == 0 && s.cu[s.sequences] == s.tokens, "cu_seqlens must go from 0 to the number of tokens");
    for (int64_t i = 0; i < s.sequences; i++)
      STD_TORCH_CHECK(s.cu[i] <= s.cu[i + 1], "cu_seqlens must not descend; it does at sequence ", i);
  }
  for (const double* lams : {s.lams, s.critic_lams}) {
    for (int64_t i = 0; lams && i < s.sequences; i++)
      STD_TORCH_CHECK(lams[i] >= 0.0 && lams[i] <= 1.0, "lambdas must be from 0 to 1; that of sequence ", i, " is not");
  }
}

void run(const Scan& s) {
  check_sequences(s);
  const int64_t chunks = (s.tokens + kChunk - 1) / kChunk;
  std::vector<Pair> pairs(chunks);
  std::vector<uint8_t> begins_within(chunks + 1, 0);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t from, int64_t to) {
    for (int64_t c = from; c < to; c++) {
      const int64_t begin = c * kChunk, sequence = sequence_of(s, begin), end = s.first(sequence + 1);
      if (s.first(sequence) == begin) continue;
      begins_within[c] = 1;
      const int64_t stop = std::min({end, begin + kChunk, s.tokens});
      pairs[c] = pair_of(s, sequence, begin, stop, end <= begin + kChunk);
    }
  });
  std::vector<Carried> into(chunks + 1);
  for (int64_t c = chunks - 1; c > 0; c--) {
    if (!begins_within[c]) continue;
    const Pair& pair = pairs[c];
    const Carried& x = into[c];
    into[c - 1] = pair.closed ? Carried{pair.b, pair.critic_b}
                              : Carried{pair.m * x.x + pair.b, pair.critic_m * x.critic_x + pair.critic_b};
  }
  std::vector<ChunkSums> sums(chunks);
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t from, int64_t to) {
    Block block;
    for (int64_t c = from; c < to; c++) {
      const int64_t begin = c * kChunk, end = std::min(begin + kChunk, s.tokens);
      PivotSums pivot;
      Carried carried = into[c];
      int64_t sequence = sequence_of(s, end - 1);
      for (int64_t stop = end; stop > begin;) {
        while (s.first(sequence) >= stop) sequence--;  // empty sequences
        const int64_t start = std::max(begin, s.first(sequence));
        sweep(s, sequence, start, stop, carried, block, pivot, sums[c].stray);
        carried = {};
        stop = start;
      }
      sums[c].moments = pivot.moments();
    }
  });
  Moments whole{0.0, 0.0, 0.0};
  int64_t stray = 0;
  for (const ChunkSums& one : sums) whole = merge(whole, one.moments), stray += one.stray;
  s.stats[0] = whole.count, s.stats[1] = whole.mean, s.stats[2] = whole.m2;
  s.stats[3] = static_cast<double>(stray), s.stats[4] = 0.0;
}

std::tuple<Tensor, Tensor, Tensor> gae(Tensor rewards, MaybeTensor values, Tensor mask, MaybeTensor cu_seqlens,
                                       MaybeTensor kept, MaybeTensor kl, MaybeTensor ref, int64_t kl_kind,
                                       double kl_coef, double gamma, double lam, double critic_lam, MaybeTensor lams,
                                       MaybeTensor critic_lams) {
  const Prepared p = prepare(rewards, values, mask, cu_seqlens, kept, kl, ref, kl_kind, kl_coef, gamma, lam, critic_lam,
                             lams, critic_lams);
  run(p.scan);
  return p.results();
}

MRL_WIDE void whiten_block(const float* __restrict values, const int32_t* __restrict keep, double mean, double scale,
                           double back, float* __restrict to, int n) {
  for (int i = 0; i < n; i++)
    to[i] = only(static_cast<float>((static_cast<double>(values[i]) - mean) / scale + back), keep[i]);
}

Tensor whiten(Tensor values, Tensor mask, MaybeTensor cu_seqlens, MaybeTensor kept, Tensor mean_std, bool shift_mean) {
  check_whiten(values, mask, cu_seqlens, kept, mean_std);
  Prepared p;  // for its sequences and mask alone
  p.rewards = compact(values), p.mask = compact(mask);
  p.cu = compact(cu_seqlens), p.kept = compact(kept);
  Scan s{};
  s.tokens = values.numel(), s.cu = data<int64_t>(p.cu), s.kept = data<uint8_t>(p.kept);
  s.sequences = s.cu ? cu_seqlens->numel() - 1 : values.size(0);
  s.length = s.cu ? 0 : values.size(1);
  check_sequences(s);
  const bool half = values.scalar_type() == ScalarType::BFloat16;
  const Tensor pair = compact(mean_std);
  const double mean = static_cast<const double*>(pair.const_data_ptr())[0];
  const double scale = static_cast<const double*>(pair.const_data_ptr())[1] + 1e-8;
  Tensor whitened = torch::stable::new_empty(p.rewards, values.sizes(), ScalarType::Float);
  const void* from = p.rewards.const_data_ptr();
  const uint8_t* masks = static_cast<const uint8_t*>(p.mask.const_data_ptr());
  float* to = static_cast<float*>(whitened.mutable_data_ptr());
  const int64_t chunks = (s.tokens + kChunk - 1) / kChunk;
  torch::stable::parallel_for(0, chunks, 1, [&](int64_t first, int64_t last) {
    float room[kBlock];
    Keep keep;
    for (int64_t begin = first * kChunk; begin < std::min(last * kChunk, s.tokens);) {
      const int64_t sequence = s.kept ? sequence_of(s, begin) : 0;
      int64_t end = std::min(last * kChunk, s.tokens);
      if (s.kept) end = std::min(end, s.first(sequence + 1));
      if (s.kept && !s.kept[sequence]) {
        std::fill(to + begin, to + end, 0.0f);
        begin = end;
      }
      for (; begin < end; begin += kBlock) {
        const int n = static_cast<int>(std::min<int64_t>(kBlock, end - begin));
        const float* block = floats(from, half, begin, n, room);
        make_keep(masks + begin, keep, n);
        whiten_block(block, keep.narrow, mean, scale, shift_mean ? 0.0 : mean, to + begin, n);
      }
      begin = end;
    }
  });
  return whitened;
}

// The group of each sequence, numbered from 0. Numbers that lie close together are used as they are.
std::vector<int64_t> dense(const int64_t* ids, int64_t n, int64_t& groups) {
  groups = 0;
  std::vector<int64_t> places(n);
  if (n == 0) return places;
  const auto [low, high] = std::minmax_element(ids, ids + n);
  const uint64_t span = static_cast<uint64_t>(*high) - static_cast<uint64_t>(*low);
  if (span < static_cast<uint64_t>(4 * n + 1024)) {
    groups = static_cast<int64_t>(span) + 1;
    for (int64_t i = 0; i < n; i++) places[i] = ids[i] - *low;
    return places;
  }
  std::vector<int64_t> known(ids, ids + n);
  std::sort(known.begin(), known.end());
  known.erase(std::unique(known.begin(), known.end()), known.end());
  groups = static_cast<int64_t>(known.size());
  for (int64_t i = 0; i < n; i++) places[i] = std::lower_bound(known.begin(), known.end(), ids[i]) - known.begin();
  return places;
}

std::tuple<Tensor, Tensor, Tensor> group_advantages(Tensor returns, Tensor group_ids, int64_t kind) {
  check_groups(returns, group_ids, kind);
  const Tensor from = compact(returns), ids = compact(group_ids);
  const int64_t n = returns.numel();
  const double* r = static_cast<const double*>(from.const_data_ptr());
  int64_t groups = 0;
  const std::vector<int64_t> of = dense(static_cast<const int64_t*>(ids.const_data_ptr()), n, groups);
  struct Group {
    double count = 0.0, sum = 0.0, first = 0.0, squares = 0.0;
    bool flat = true;
  };
  std::vector<Group> group(groups);
  for (int64_t i = 0; i < n; i++) {
    Group& g = group[of[i]];
    if (g.count == 0.0) g.first = r[i];
    g.flat = g.flat && r[i] == g.first;  // false for NaN
    g.count += 1.0;
    g.sum += r[i];
  }
  for (int64_t i = 0; i < n; i++) {
    Group& g = group[of[i]];
    const double gap = r[i] - g.sum / g.count;
    g.squares += gap * gap;
  }
  Tensor advantages = torch::stable::empty_like(from), means = torch::stable::empty_like(from);
  Tensor stds = torch::stable::empty_like(from);
  double* advantage = static_cast<double*>(advantages.mutable_data_ptr());
  double* mean = static_cast<double*>(means.mutable_data_ptr());
  double* std = static_cast<double*>(stds.mutable_data_ptr());
  for (int64_t i = 0; i < n; i++) {
    const Group& g = group[of[i]];
    mean[i] = g.flat ? r[i] : g.sum / g.count;
    std[i] = g.flat ? 0.0 : std::sqrt(g.squares / std::max(g.count - 1.0, 1.0));
    advantage[i] = group_advantage(kind, r[i] - mean[i], std[i], g.count);
  }
  return {advantages, means, stds};
}

}  // namespace
}  // namespace megatron_rl

STABLE_TORCH_LIBRARY(megatron_rl, m) {
  m.def(
      "gae(Tensor rewards, Tensor? values, Tensor mask, Tensor? cu_seqlens, Tensor? kept, Tensor? kl, Tensor? ref, "
      "int kl_kind, float kl_coef, float gamma, float lam, float critic_lam, Tensor? lams, Tensor? critic_lams) "
      "-> (Tensor, Tensor, Tensor)");
  m.def("group_advantages(Tensor returns, Tensor group_ids, int kind) -> (Tensor, Tensor, Tensor)");
  m.def(
      "whiten(Tensor values, Tensor mask, Tensor? cu_seqlens, Tensor? kept, Tensor mean_std, bool shift_mean) "
      "-> Tensor");
}

STABLE_TORCH_LIBRARY_IMPL(megatron_rl, CPU, m) {
  m.impl("gae", TORCH_BOX(&megatron_rl::gae));
  m.impl("group_advantages", TORCH_BOX(&megatron_rl::group_advantages));
  m.impl("whiten", TORCH_BOX(&megatron_rl::whiten));
}

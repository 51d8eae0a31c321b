// Rule P of runtime/adam_rule.py: one pass over the state, whatever the number of gradients.
//
// Results do not depend on how ranges are cut, or on the width of this CPU's vectors: every element takes the same
// operations, each rounded one time. That needs -ffp-contract=off.
#pragma once

#include <cstdint>

#include "state_forms.h"
#include "vectors.h"

namespace zenflow {

// ---- the rule

// One gradient of an update window: the hyperparameters of the optimizer step that used it.
struct Step {
  float grad_scale;
  float beta1;
  float beta1_rest;  // 1 - beta1, computed in double precision
  float beta2;
  float beta2_rest;
};

// The update window of one parameter. Python fills it: see UpdateWindow in native/library.py.
struct UpdateWindow {
  StoredState state;
  void* out;
  const void* const* gradients;  // oldest first
  const Step* steps;             // one for each
  int64_t count;                 // of gradients
  int64_t slices;                // of int8 gradients, which begin with a scale per slice: float[slices]
  uint32_t random;               // decides how moments are rounded to fewer bits: another number at each update
  int32_t gradient_dtype;
  int32_t out_dtype;
  float decay;
  float step_size;
  float bias_correction2_sqrt;
  float eps;
};

inline Floats root(Floats values) {
  Floats roots;
  // Becomes one instruction with -fno-math-errno.
  for (int lane = 0; lane < kLanes; ++lane) roots[lane] = __builtin_sqrtf(values[lane]);
  return roots;
}

inline void add_gradient(const Step& step, Floats gradient, Floats& exp_avg, Floats& exp_avg_sq) {
  gradient = gradient * step.grad_scale;
  exp_avg = step.beta1 * exp_avg + step.beta1_rest * gradient;
  exp_avg_sq = step.beta2 * exp_avg_sq + step.beta2_rest * gradient * gradient;
}

// The factors of an update window that all of its elements share. They are copied because the compiler loads members of
// the window again after each store, which might have changed them.
struct Factors {
  explicit Factors(const UpdateWindow& window)
      : decay(window.decay), step_size(window.step_size), bias_correction2_sqrt(window.bias_correction2_sqrt), eps(window.eps) {}

  const float decay, step_size, bias_correction2_sqrt, eps;
};

inline Floats new_master(const Factors& factors, Floats master, Floats exp_avg, Floats exp_avg_sq) {
  const Floats denominator = root(exp_avg_sq) / factors.bias_correction2_sqrt + factors.eps;
  return factors.decay * master - factors.step_size * exp_avg / denominator;
}

// Gradients in the order of the state.
template <class Gradient>
struct Dense {
  const UpdateWindow& window;
  Floats load(int64_t number, int64_t at) const {
    return Gradient::load((const typename Gradient::Element*)window.gradients[number] + at);
  }
  Floats load_some(int64_t number, int64_t at, int count) const {
    return zenflow::load_some<Gradient>((const typename Gradient::Element*)window.gradients[number] + at, count);
  }
};

// int8 gradients inside of one slice.
struct Compressed {
  const UpdateWindow& window;
  int64_t slice;
  const int8_t* values(int64_t number) const {
    return (const int8_t*)window.gradients[number] + sizeof(float) * window.slices;
  }
  float scale(int64_t number) const { return ((const float*)window.gradients[number])[slice]; }
  Floats load(int64_t number, int64_t at) const { return Int8::load(values(number) + at) * scale(number); }
  Floats load_some(int64_t number, int64_t at, int count) const {
    return zenflow::load_some<Int8>(values(number) + at, count) * scale(number);
  }
};

// fp32 state from element `origin` on.
struct PlainState {
  float* master_;
  float* exp_avg_;
  float* exp_avg_sq_;
  int64_t origin;

  void load(int64_t at, Floats* exp_avg, Floats* exp_avg_sq) const {
    each_vector<kVectors>([&](int i) {
      exp_avg[i] = Float32::load(exp_avg_ + at - origin + i * kLanes);
      exp_avg_sq[i] = Float32::load(exp_avg_sq_ + at - origin + i * kLanes);
    });
  }
  void store(int64_t at, const Floats* exp_avg, const Floats* exp_avg_sq) {
    each_vector<kVectors>([&](int i) {
      Float32::store(exp_avg_ + at - origin + i * kLanes, exp_avg[i]);
      Float32::store(exp_avg_sq_ + at - origin + i * kLanes, exp_avg_sq[i]);
    });
  }
  Floats master(int64_t at) const { return Float32::load(master_ + at - origin); }
  void store_master(int64_t at, Floats master) { Float32::store(master_ + at - origin, master); }
};

// Updates whole blocks. Returns the first element behind them.
template <class Out, class State, class Gradients>
int64_t update_blocks(const UpdateWindow& window, State state, const Gradients& gradients, int64_t begin, int64_t end) {
  auto* const out = (typename Out::Element*)window.out;
  const Factors factors(window);
  const Step* const steps = window.steps;  // a copy for the same reason, as the count
  const int64_t count = window.count;
  int64_t at = begin;
  for (; at + kBlock <= end; at += kBlock) {
    Floats exp_avg[kVectors], exp_avg_sq[kVectors];
    state.load(at, exp_avg, exp_avg_sq);
    for (int64_t number = 0; number < count; ++number) {
      const Step step = steps[number];
      each_vector<kVectors>([&](int i) {
        add_gradient(step, gradients.load(number, at + i * kLanes), exp_avg[i], exp_avg_sq[i]);
      });
    }
    // Before the masters: the CPU converts moments while its divider works.
    state.store(at, exp_avg, exp_avg_sq);
    each_vector<kVectors>([&](int i) {
      const int64_t here = at + i * kLanes;
      // Hazard: the new weights may overwrite those that a split master is made of. It is read first.
      const Floats master = new_master(factors, state.master(here), exp_avg[i], exp_avg_sq[i]);
      state.store_master(here, master);
      Out::store(out + here, master);
    });
  }
  return at;
}

template <class Out, class Gradients>
void update(const UpdateWindow& window, const PlainState& state, const Gradients& gradients, int64_t begin, int64_t end) {
  auto* const out = (typename Out::Element*)window.out;
  const Factors factors(window);
  for (int64_t at = update_blocks<Out>(window, state, gradients, begin, end); at < end; at += kLanes) {
    const int count = end - at < kLanes ? (int)(end - at) : kLanes;
    const int64_t in_state = at - state.origin;
    Floats exp_avg = load_some<Float32>(state.exp_avg_ + in_state, count);
    Floats exp_avg_sq = load_some<Float32>(state.exp_avg_sq_ + in_state, count);
    for (int64_t number = 0; number < window.count; ++number) {
      add_gradient(window.steps[number], gradients.load_some(number, at, count), exp_avg, exp_avg_sq);
    }
    const Floats master = new_master(factors, load_some<Float32>(state.master_ + in_state, count), exp_avg, exp_avg_sq);
    store_some<Float32>(state.exp_avg_ + in_state, exp_avg, count);
    store_some<Float32>(state.exp_avg_sq_ + in_state, exp_avg_sq, count);
    store_some<Float32>(state.master_ + in_state, master, count);
    store_some<Out>(out + at, master, count);
  }
}

// Whole blocks of state in fewer bytes; [begin, end) is in one slice, if moments or gradients have 8 bits. Returns the
// first element behind them.
template <class Out, bool kSplit, int kMoments>
int64_t update_stored(const UpdateWindow& window, int64_t begin, int64_t end) {
  StoredBlocks<kSplit, kMoments> state(window.state, begin, window.random);
  if (window.gradient_dtype == kInt8) {
    return update_blocks<Out>(window, state, Compressed{window, begin / window.state.length}, begin, end);
  }
  return update_blocks<Out>(window, state, Dense<Out>{window}, begin, end);
}

template <class Out>
int64_t update_stored(const UpdateWindow& window, int64_t begin, int64_t end) {
  const StoredState& state = window.state;
  if (!state.split) {
    return state.moments == kInt8 ? update_stored<Out, false, kInt8>(window, begin, end)
                                  : update_stored<Out, false, kBFloat16>(window, begin, end);
  }
  if constexpr (std::is_same_v<Out, BFloat16>) {
    switch (state.moments) {
      case kInt8: return update_stored<Out, true, kInt8>(window, begin, end);
      case kBFloat16: return update_stored<Out, true, kBFloat16>(window, begin, end);
      default: return update_stored<Out, true, kFloat32>(window, begin, end);
    }
  }
  return begin;
}

template <class Out>
void update_any(const UpdateWindow& window, const PlainState& state, int64_t begin, int64_t end) {
  const int64_t length = window.state.length;
  switch (window.gradient_dtype) {
    case kFloat32: return update<Out>(window, state, Dense<Float32>{window}, begin, end);
    case kBFloat16: return update<Out>(window, state, Dense<BFloat16>{window}, begin, end);
    case kFloat16: return update<Out>(window, state, Dense<Float16>{window}, begin, end);
    case kInt8:
      while (begin < end) {
        const int64_t slice = begin / length;
        const int64_t stop = (slice + 1) * length < end ? (slice + 1) * length : end;
        update<Out>(window, state, Compressed{window, slice}, begin, stop);
        begin = stop;
      }
  }
}

}  // namespace zenflow

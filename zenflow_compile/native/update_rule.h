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

inline Floats new_master(const UpdateWindow& window, Floats master, Floats exp_avg, Floats exp_avg_sq) {
  const Floats denominator = root(exp_avg_sq) / window.bias_correction2_sqrt + window.eps;
  return window.decay * master - window.step_size * exp_avg / denominator;
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
  float* master;
  float* exp_avg;
  float* exp_avg_sq;
  int64_t origin;
};

template <class Out, class Gradients>
void update(const UpdateWindow& window, const PlainState& state, const Gradients& gradients, int64_t begin, int64_t end) {
  auto* const out = (typename Out::Element*)window.out;
  int64_t at = begin;
  for (; at + kBlock <= end; at += kBlock) {
    Floats exp_avg[kVectors], exp_avg_sq[kVectors];
    for (int i = 0; i < kVectors; ++i) {
      exp_avg[i] = Float32::load(state.exp_avg + at - state.origin + i * kLanes);
      exp_avg_sq[i] = Float32::load(state.exp_avg_sq + at - state.origin + i * kLanes);
    }
    for (int64_t number = 0; number < window.count; ++number) {
      const Step step = window.steps[number];
      for (int i = 0; i < kVectors; ++i) {
        add_gradient(step, gradients.load(number, at + i * kLanes), exp_avg[i], exp_avg_sq[i]);
      }
    }
    for (int i = 0; i < kVectors; ++i) {
      const int64_t here = at + i * kLanes, in_state = here - state.origin;
      const Floats master = new_master(window, Float32::load(state.master + in_state), exp_avg[i], exp_avg_sq[i]);
      Float32::store(state.exp_avg + in_state, exp_avg[i]);
      Float32::store(state.exp_avg_sq + in_state, exp_avg_sq[i]);
      Float32::store(state.master + in_state, master);
      Out::store(out + here, master);
    }
  }
  for (; at < end; at += kLanes) {
    const int count = end - at < kLanes ? (int)(end - at) : kLanes;
    const int64_t in_state = at - state.origin;
    Floats exp_avg = load_some<Float32>(state.exp_avg + in_state, count);
    Floats exp_avg_sq = load_some<Float32>(state.exp_avg_sq + in_state, count);
    for (int64_t number = 0; number < window.count; ++number) {
      add_gradient(window.steps[number], gradients.load_some(number, at, count), exp_avg, exp_avg_sq);
    }
    const Floats master = new_master(window, load_some<Float32>(state.master + in_state, count), exp_avg, exp_avg_sq);
    store_some<Float32>(state.exp_avg + in_state, exp_avg, count);
    store_some<Float32>(state.exp_avg_sq + in_state, exp_avg_sq, count);
    store_some<Float32>(state.master + in_state, master, count);
    store_some<Out>(out + at, master, count);
  }
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

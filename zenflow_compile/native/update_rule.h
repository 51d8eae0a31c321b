// Rule P of runtime/update_rule.py: one pass over the state, whatever the number of gradients. The rule's own two functions
// are printed: see rules/cpp.py.
//
// Results do not depend on how ranges are cut, or on the width of this CPU's vectors: every element takes the same
// operations, each rounded one time. That needs -ffp-contract=off.
#pragma once

#include <cstdint>

#include "state_forms.h"
#include "vectors.h"
#include "windows.h"

// ---- what rules compute with

namespace zenflow {

inline Floats root(Floats values) {
  Floats roots;
  // Becomes one instruction with -fno-math-errno.
  for (int lane = 0; lane < kLanes; ++lane) roots[lane] = __builtin_sqrtf(values[lane]);
  return roots;
}

inline Floats negative(Floats values) { return -values; }
inline Floats magnitude(Floats values) { return (Floats)((Words)values & 0x7fffffffu); }
inline Floats sign(Floats values) { return __builtin_convertvector((values < 0) - (values > 0), Floats); }
inline Floats larger(Floats one, Floats other) { return one > other || one != one ? one : other; }

}  // namespace zenflow

#include "printed_rule.h"

namespace zenflow {

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

using RuleValues = Values<Rule::values>;

// fp32 state from element `origin` on.
struct PlainState {
  float* master_;
  float* arrays_[kMostArrays];
  int64_t origin;

  void load(int64_t at, RuleValues* values) const {
    each_vector<kVectors>([&](int i) {
      each_vector<Rule::count>([&](int array) {
        values[i].at[array] = Float32::load(arrays_[array] + at - origin + i * kLanes);
      });
    });
  }
  void store(int64_t at, const RuleValues* values) {
    each_vector<kVectors>([&](int i) {
      each_vector<Rule::count>([&](int array) {
        Float32::store(arrays_[array] + at - origin + i * kLanes, values[i].at[array]);
      });
    });
  }
  Floats master(int64_t at) const { return Float32::load(master_ + at - origin); }
  void store_master(int64_t at, Floats master) { Float32::store(master_ + at - origin, master); }
};

// Updates whole blocks. Returns the first element behind them.
template <class Out, class State, class Gradients>
int64_t update_blocks(const UpdateWindow& window, State state, const Gradients& gradients, int64_t begin, int64_t end) {
  auto* const out = (typename Out::Element*)window.out;
  // Copies: the compiler loads members of the window again after each store, which might have changed them.
  const Numbers of_window = window.numbers;
  const Step* const steps = window.steps;
  const int64_t count = window.count;
  int64_t at = begin;
  for (; at + kBlock <= end; at += kBlock) {
    RuleValues values[kVectors] = {};  // those of the window begin at zero
    state.load(at, values);
    Floats weights[kVectors];
    if constexpr (Rule::reads_weight) each_vector<kVectors>([&](int i) { weights[i] = state.master(at + i * kLanes); });
    for (int64_t number = 0; number < count; ++number) {
      const Step step = steps[number];
      each_vector<kVectors>([&](int i) {
        accumulate(step.numbers, weights[i], gradients.load(number, at + i * kLanes) * step.grad_scale, values[i]);
      });
    }
    // Before the masters: the CPU converts moments while its divider works.
    state.store(at, values);
    each_vector<kVectors>([&](int i) {
      const int64_t here = at + i * kLanes;
      // Hazard: the new weights may overwrite those that a split master is made of. It is read first.
      const Floats master = apply(of_window, Rule::reads_weight ? weights[i] : state.master(here), values[i]);
      state.store_master(here, master);
      Out::store(out + here, master);
    });
  }
  return at;
}

template <class Out, class Gradients>
void update(const UpdateWindow& window, const PlainState& state, const Gradients& gradients, int64_t begin, int64_t end) {
  auto* const out = (typename Out::Element*)window.out;
  for (int64_t at = update_blocks<Out>(window, state, gradients, begin, end); at < end; at += kLanes) {
    const int count = end - at < kLanes ? (int)(end - at) : kLanes;
    const int64_t in_state = at - state.origin;
    RuleValues values = {};
    for (int array = 0; array < Rule::count; ++array) {
      values.at[array] = load_some<Float32>(state.arrays_[array] + in_state, count);
    }
    const Floats weight = load_some<Float32>(state.master_ + in_state, count);
    for (int64_t number = 0; number < window.count; ++number) {
      const Step& step = window.steps[number];
      accumulate(step.numbers, weight, gradients.load_some(number, at, count) * step.grad_scale, values);
    }
    const Floats master = apply(window.numbers, weight, values);
    for (int array = 0; array < Rule::count; ++array) {
      store_some<Float32>(state.arrays_[array] + in_state, values.at[array], count);
    }
    store_some<Float32>(state.master_ + in_state, master, count);
    store_some<Out>(out + at, master, count);
  }
}

// Whole blocks of state in fewer bytes; [begin, end) is in one slice, if moments or gradients have 8 bits. Returns the
// first element behind them.
template <class Out, bool kSplit, int kMoments>
int64_t update_stored(const UpdateWindow& window, int64_t begin, int64_t end) {
  StoredBlocks<Rule, kSplit, kMoments> state(window.state, begin, window.random);
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

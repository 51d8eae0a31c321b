// What Python fills for an update of host state: see native/library.py.
#pragma once

#include <cstdint>

#include "vectors.h"

namespace zenflow {

constexpr int kMostNumbers = 8;  // MOST_NUMBERS in rules/rule.py
constexpr int kMostArrays = 4;   // MOST_ARRAYS there
constexpr int kMostRounded = 2;  // MOST_ROUNDED there

// Numbers that all elements share, in the order in which the rule names them.
struct Numbers {
  float at[kMostNumbers];
};

// One gradient of an update window.
struct Step {
  float grad_scale;
  Numbers numbers;  // of_gradient
};

// The state of one parameter.
struct StoredState {
  void* master;                // float, or with `split` the int16 that completes a bf16 weight
  void* arrays[kMostArrays];   // those that may be rounded come first, in the dtype `moments`; the others are float
  const void* weights;         // bf16; with `split`
  int64_t length;              // of a slice
  int32_t split;
  int32_t moments;             // kFloat32, kBFloat16 or kInt8
  int32_t count;               // of arrays
  int32_t rounded;             // how many may be rounded
  uint32_t nonnegative;        // bit i: no element of array i is below zero
};

// The update window of one parameter.
struct UpdateWindow {
  StoredState state;
  void* out;
  const void* const* gradients;  // oldest first
  const Step* steps;             // one for each
  void (*update)(const UpdateWindow*, int64_t begin, int64_t end);  // of the rule: see host_rule.cpp
  int64_t count;                 // of gradients
  int64_t slices;                // of int8 gradients, which begin with a scale per slice: float[slices]
  uint32_t random;               // decides how moments are rounded to fewer bits: another number at each update
  int32_t gradient_dtype;
  int32_t out_dtype;
  Numbers numbers;               // of_window
};

// The values of some elements: of the arrays, then those that live in a window alone.
template <int kCount>
struct Values {
  Floats at[kCount];
};

}  // namespace zenflow

// Optimizer state in fewer bytes, as runtime/state_forms.py describes it: conversion from and to fp32.
//
// Whole blocks are converted in registers, in the loop of the update: integer units convert while the divider works. Parts
// of a block go through memory. Results depend on the values alone, not on where they are, how ranges are cut, or the
// width of vectors.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "windows.h"

namespace zenflow {

constexpr int kQuantizationBlock = 32;  // QUANTIZATION_BLOCK in planning/plan.py
constexpr int kBlockVectors = kQuantizationBlock / kLanes;
constexpr int kTile = 512;  // most elements that are converted in memory at a time: they stay in the L1 cache

// Calls `work(array)` for each array that may be rounded.
template <class Kinds, class Work>
inline void each_rounded(const Kinds& kinds, Work work) {
  each_vector<kMostRounded>([&](int array) {
    if (array < kinds.rounded) work(array);
  });
}

inline bool is_plain(const StoredState& state) { return !state.split && state.moments == kFloat32; }

template <class To, class From>
inline To bits_as(From from) {
  static_assert(sizeof(To) == sizeof(From), "");
  To to;
  std::memcpy(&to, &from, sizeof to);
  return to;
}

// ---- random bits

template <class Bits>
inline Bits mixed(Bits bits) {  // "lowbias32" of C. Wellons, Prospecting for Hash Functions (2018)
  bits ^= bits >> 16;
  bits *= 0x7feb352du;
  bits ^= bits >> 15;
  bits *= 0x846ca68bu;
  return bits ^ (bits >> 16);
}

// 32 bits that decide how the moments of elements are rounded: a function of their bits and of the step.
template <class Kinds, int kCount>
inline Words random_bits(const Kinds& kinds, const Values<kCount>& values, uint32_t step) {
  Words bits = (Words)values.at[0] + step * 0x9e3779b9u;
  if (kinds.rounded > 1) bits += (Words)values.at[1] << 16 | (Words)values.at[1] >> 16;
  return mixed(bits);
}

// ---- split masters

inline Floats join(const uint16_t* weights, const int16_t* rest) {
  const Ints low = (Ints)(load_halves((const uint16_t*)rest) << 16) >> 16;  // with its sign
  return (Floats)((load_halves(weights) << 16) + (Words)low);
}

// Stores what the cast of `BFloat16` takes away.
inline void split(Floats master, int16_t* rest) {
  const Words weight = nearest_bfloat16(master) << 16;
  const Ints left = (Ints)((Words)master - weight);
  const Ints fits = left > 32767 ? 32767 : left;  // a tie that was rounded down: one fp32 ulp lower
  store_halves((uint16_t*)rest, (Words)(master != master ? 0 : fits));
}

// ---- moments in bf16

inline void store_rounded(uint16_t* to, Floats values, Words half) {
  // Infinite numbers stay so: the bits that are cut off are zeros.
  store_halves(to, values != values ? 0x7fc0u : ((Words)values + half) >> 16);
}

template <class Kinds, int kCount>
inline void narrow(const Kinds& kinds, const Values<kCount>& values, uint16_t* const to[kMostRounded], uint32_t step) {
  const Words random = random_bits(kinds, values, step);
  each_rounded(kinds, [&](int array) { store_rounded(to[array], values.at[array], array ? random >> 16 : random & 0xffff); });
}

// ---- moments in 8 bits

// A code without its sign is 4 bits of exponent and `kMantissa` of mantissa, of a number in [0, 1]: the largest exponent
// stands for 2^0, the smallest one for subnormal numbers.
constexpr int kMantissa = 3, kMantissaSquare = 4;
constexpr uint32_t kSmallestNormal = (127 - 14) << 23;  // the bits of 2^-14
constexpr uint32_t kExponents = (127 - 15) << 23;       // from those of a code to those of fp32

// Of numbers in [0, 1], rounded up if the bits of `random` below a code's last one carry.
template <int mantissa>
inline Words code_of(Floats value, Words random) {
  // Below the smallest normal number, the sum has the number in its last bits, and is the larger one of the two.
  const Ints subnormal = (Ints)(value + bits_as<float>(kSmallestNormal)) - (int32_t)kSmallestNormal;
  const Ints normal = (Ints)value - (int32_t)kExponents;
  return ((Words)(normal > subnormal ? normal : subnormal) + random) >> (23 - mantissa);
}

template <int mantissa>
inline Floats value_of(Words code) {
  const Words bits = code << (23 - mantissa);
  const Ints normal = (Ints)(bits + kExponents);
  // The smaller one of the two below the smallest normal number.
  const Ints subnormal = (Ints)((Floats)(bits + kSmallestNormal) - bits_as<float>(kSmallestNormal));
  return (Floats)(subnormal < normal ? subnormal : normal);
}

// The scale of a block, as the exponent bits of a power of two that is not below any magnitude; 0 if all are too small for
// one, kLost if one is too large or not finite: then all of the block is lost, and not one element.
constexpr uint32_t kLost = 255;

template <int kCount>
inline uint8_t scale_of(const Values<kCount>* values, int array) {
  Words most{};  // bits of floats without a sign are in the order of the floats
  each_vector<kBlockVectors>([&](int i) {
    const Words magnitude = (Words)values[i].at[array] & 0x7fffffffu;
    most = magnitude > most ? magnitude : most;
  });
  const uint32_t bits = largest(most), exponent = (bits + 0x7fffffu) >> 23;
  return (uint8_t)(bits < 0x00800000u ? 0 : exponent >= 254 ? kLost : exponent);
}

inline float power(uint32_t scale) { return scale == kLost ? __builtin_nanf("") : bits_as<float>(scale << 23); }
inline float inverse(uint32_t scale) { return scale == 0 || scale == kLost ? 0.0f : bits_as<float>((254 - scale) << 23); }

// Where the scales and the codes of the moments of one quantization block are.
struct Block {
  uint8_t* scales[kMostRounded];
  uint8_t* codes[kMostRounded];
};

// Stores one quantization block.
template <class Kinds, int kCount>
inline void quantize(const Kinds& kinds, const Values<kCount>* values, const Block& block, uint32_t step) {
  uint32_t scales[kMostRounded];
  each_rounded(kinds, [&](int array) { scales[array] = *block.scales[array] = scale_of(values, array); });
  each_vector<kBlockVectors>([&](int i) {
    const Words random = random_bits(kinds, values[i], step);
    each_rounded(kinds, [&](int array) {
      const Floats value = values[i].at[array];
      const float by = inverse(scales[array]);
      uint8_t* const codes = block.codes[array] + i * kLanes;
      if (kinds.nonnegative >> array & 1) {
        const Words code = code_of<kMantissaSquare>(value * by, random >> 13);
        // Hazard: a second moment of 0 divides the first one by eps alone.
        const Words bits = (Words)(value * by), least = bits < 1u ? bits : 1u;
        store_bytes(codes, code > least ? code : least);
      } else {
        const Words code = code_of<kMantissa>((Floats)((Words)value & 0x7fffffffu) * by, random & 0xfffffu);
        store_bytes(codes, code | ((Words)value >> 24 & 0x80u));
      }
    });
  });
  each_rounded(kinds, [&](int array) {
    if (scales[array] == kLost) std::memset(block.codes[array], 0, kQuantizationBlock);
  });
}

// Loads one quantization block.
template <class Kinds, int kCount>
inline void expand(const Kinds& kinds, const Block& block, Values<kCount>* values) {
  float by[kMostRounded];
  each_rounded(kinds, [&](int array) { by[array] = power(*block.scales[array]); });
  each_vector<kBlockVectors>([&](int i) {
    each_rounded(kinds, [&](int array) {
      const Words code = load_bytes(block.codes[array] + i * kLanes);
      if (kinds.nonnegative >> array & 1) {
        values[i].at[array] = value_of<kMantissaSquare>(code) * by[array];
      } else {
        const Words magnitude = (Words)(value_of<kMantissa>(code & 0x7f) * by[array]);
        values[i].at[array] = (Floats)(magnitude | (code << 24 & 0x80000000u));
      }
    });
  });
}

// Where the codes of element `at`, and the scale of its block, are in a stored moment. A slice begins with its scales.
struct BlockPlace {
  int64_t codes;
  int64_t scale;
};

inline BlockPlace place_of(const StoredState& state, int64_t at) {
  const int64_t blocks = (state.length + kQuantizationBlock - 1) / kQuantizationBlock;
  const int64_t slice = at / state.length, column = at % state.length;
  const int64_t begin = slice * (blocks + state.length);
  return {begin + blocks + column, begin + column / kQuantizationBlock};
}

// ---- all of it

// End of the tile that begins at element `at`: of 8-bit moments, it is whole quantization blocks of one slice.
inline int64_t tile_end(const StoredState& state, int64_t at, int64_t end) {
  int64_t stop = at + kTile;
  if (state.moments == kInt8) {
    const int64_t slice_end = (at / state.length + 1) * state.length;
    stop = stop < slice_end ? stop : slice_end;
  }
  return stop < end ? stop : end;
}

// The block of element `at`.
inline Block block_of(const StoredState& state, int64_t at) {
  const BlockPlace place = place_of(state, at);
  Block block{};
  each_rounded(state, [&](int array) {
    block.scales[array] = (uint8_t*)state.arrays[array] + place.scale;
    block.codes[array] = (uint8_t*)state.arrays[array] + place.codes;
  });
  return block;
}

inline void go_on(Block& block) {
  for (int array = 0; array < kMostRounded; ++array) block.scales[array] += 1, block.codes[array] += kQuantizationBlock;
}

// ---- parts of blocks, through memory

// Calls `convert(at, count)` for consecutive parts of `count` elements of at most `most`.
template <class Convert>
inline void in_parts(int count, int most, Convert convert) {
  for (int at = 0; at < count; at += most) convert(at, count - at < most ? count - at : most);
}

inline void decode_moments(const StoredState& state, int64_t at, int count, float* const values[kMostRounded]) {
  if (state.moments == kBFloat16) {
    return each_rounded(state, [&](int array) {
      const auto* from = (const uint16_t*)state.arrays[array] + at;
      in_parts(count, kLanes, [&](int i, int n) {
        store_some<Float32>(values[array] + i, load_some<BFloat16>(from + i, n), n);
      });
    });
  }
  Block block = block_of(state, at);
  in_parts(count, kQuantizationBlock, [&](int i, int n) {
    uint8_t codes[kMostRounded][kQuantizationBlock] = {};
    Block padded = block;
    each_rounded(state, [&](int array) {
      std::memcpy(codes[array], block.codes[array], n);
      padded.codes[array] = codes[array];
    });
    Values<kMostRounded> expanded[kBlockVectors];
    expand(state, padded, expanded);
    each_rounded(state, [&](int array) {
      in_parts(n, kLanes, [&](int j, int m) {
        store_some<Float32>(values[array] + i + j, expanded[j / kLanes].at[array], m);
      });
    });
    go_on(block);
  });
}

inline void encode_moments(const StoredState& state, int64_t at, int count, const float* const values[kMostRounded],
                           uint32_t step) {
  const auto load = [&](int i, int n) {
    Values<kMostRounded> some{};
    each_rounded(state, [&](int array) { some.at[array] = load_some<Float32>(values[array] + i, n); });
    return some;
  };
  if (state.moments == kBFloat16) {
    return in_parts(count, kLanes, [&](int i, int n) {
      uint16_t rounded[kMostRounded][kLanes];
      uint16_t* const to[] = {rounded[0], rounded[1]};
      narrow(state, load(i, n), to, step);
      each_rounded(state, [&](int array) {
        std::memcpy((uint16_t*)state.arrays[array] + at + i, rounded[array], sizeof(uint16_t) * n);
      });
    });
  }
  Block block = block_of(state, at);
  in_parts(count, kQuantizationBlock, [&](int i, int n) {
    Values<kMostRounded> some[kBlockVectors] = {};
    in_parts(n, kLanes, [&](int j, int m) { some[j / kLanes] = load(i + j, m); });
    uint8_t codes[kMostRounded][kQuantizationBlock];
    Block padded = block;
    each_rounded(state, [&](int array) { padded.codes[array] = codes[array]; });
    quantize(state, some, padded, step);
    each_rounded(state, [&](int array) { std::memcpy(block.codes[array], codes[array], n); });
    go_on(block);
  });
}

// The elements of one tile in fp32: in the state where it is stored so, else in memory of its own.
class Tile {
 public:
  float* master;
  float* arrays[kMostArrays];

  void load(const StoredState& state, int64_t at, int count) {
    if (state.split) {
      master = of_master_;
      const auto *weights = (const uint16_t*)state.weights + at;
      const auto *rest = (const int16_t*)state.master + at;
      in_parts(count, kLanes, [&](int i, int n) {
        uint16_t of_weights[kLanes] = {};
        int16_t of_rest[kLanes] = {};
        std::memcpy(of_weights, weights + i, sizeof *weights * n);
        std::memcpy(of_rest, rest + i, sizeof *rest * n);
        store_some<Float32>(master + i, join(of_weights, of_rest), n);
      });
    } else {
      master = (float*)state.master + at;
    }
    const bool rounded = state.moments != kFloat32;
    for (int array = 0; array < state.count; ++array) {
      arrays[array] = rounded && array < state.rounded ? of_moments_[array] : (float*)state.arrays[array] + at;
    }
    if (rounded) decode_moments(state, at, count, arrays);
  }

  // The weights of split masters are written by others, with the cast of `BFloat16`.
  void store(const StoredState& state, int64_t at, int count, uint32_t step) const {
    if (state.split) {
      auto* const rest = (int16_t*)state.master + at;
      in_parts(count, kLanes, [&](int i, int n) {
        int16_t of_rest[kLanes];
        split(load_some<Float32>(master + i, n), of_rest);
        std::memcpy(rest + i, of_rest, sizeof *rest * n);
      });
    }
    if (state.moments != kFloat32) encode_moments(state, at, count, arrays, step);
  }

 private:
  float of_master_[kTile];
  float of_moments_[kMostRounded][kTile];
};

// ---- whole blocks, in registers

// The state from element `begin` on, block after block; 8-bit moments of one slice. `Kinds` is the rule.
template <class Kinds, bool kSplit, int kMoments>
class StoredBlocks {
 public:
  StoredBlocks(const StoredState& state, int64_t begin, uint32_t step)
      : state_(state), step_(step), block_(kMoments == kInt8 ? block_of(state, begin) : Block()) {}

  void load(int64_t at, Values<Kinds::values>* values) const {
    if constexpr (kMoments == kInt8) {
      Block block = block_;
      each_vector<kVectors / kBlockVectors>([&](int i) {
        expand(Kinds(), block, values + i * kBlockVectors);
        go_on(block);
      });
    }
    each_vector<kVectors>([&](int i) {
      each_vector<Kinds::count>([&](int array) {
        if (array >= Kinds::rounded || kMoments == kFloat32) {
          values[i].at[array] = Float32::load((const float*)state_.arrays[array] + at + i * kLanes);
        } else if (kMoments == kBFloat16) {
          values[i].at[array] = BFloat16::load((const uint16_t*)state_.arrays[array] + at + i * kLanes);
        }
      });
    });
  }

  void store(int64_t at, const Values<Kinds::values>* values) {
    if constexpr (kMoments == kInt8) {
      each_vector<kVectors / kBlockVectors>([&](int i) {
        quantize(Kinds(), values + i * kBlockVectors, block_, step_);
        go_on(block_);
      });
    }
    each_vector<kVectors>([&](int i) {
      const int64_t here = at + i * kLanes;
      if constexpr (kMoments == kBFloat16) {
        uint16_t* to[kMostRounded] = {};
        each_rounded(Kinds(), [&](int array) { to[array] = (uint16_t*)state_.arrays[array] + here; });
        narrow(Kinds(), values[i], to, step_);
      }
      each_vector<Kinds::count>([&](int array) {
        if (array >= Kinds::rounded || kMoments == kFloat32) {
          Float32::store((float*)state_.arrays[array] + here, values[i].at[array]);
        }
      });
    });
  }

  Floats master(int64_t at) const {
    if constexpr (kSplit) return join((const uint16_t*)state_.weights + at, (const int16_t*)state_.master + at);
    return Float32::load((const float*)state_.master + at);
  }

  void store_master(int64_t at, Floats master) {
    if constexpr (kSplit) {
      split(master, (int16_t*)state_.master + at);
    } else {
      Float32::store((float*)state_.master + at, master);
    }
  }

 private:
  const StoredState& state_;
  const uint32_t step_;
  Block block_;
};

}  // namespace zenflow

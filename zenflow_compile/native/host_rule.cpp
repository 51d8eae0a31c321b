// The update of host state by one rule: compiled for each rule that a process uses.
#include "update_rule.h"

namespace zenflow {

void update_plain(const UpdateWindow& window, const PlainState& state, int64_t begin, int64_t end) {
  switch (window.out_dtype) {
    case kFloat32: return update_any<Float32>(window, state, begin, end);
    case kBFloat16: return update_any<BFloat16>(window, state, begin, end);
    case kFloat16: return update_any<Float16>(window, state, begin, end);
  }
}

// Updates whole blocks of state in fewer bytes. Returns the first element that is left: `begin` if gradients and weights
// differ in dtype, which no model does.
int64_t update_stored(const UpdateWindow& window, int64_t begin, int64_t end) {
  if (window.gradient_dtype != kInt8 && window.gradient_dtype != window.out_dtype) return begin;
  switch (window.out_dtype) {
    case kFloat32: return update_stored<Float32>(window, begin, end);
    case kBFloat16: return update_stored<BFloat16>(window, begin, end);
    default: return update_stored<Float16>(window, begin, end);
  }
}

PlainState plain_state(float* master, float* const* arrays, int64_t origin) {
  PlainState state{master, {}, origin};
  for (int array = 0; array < Rule::count; ++array) state.arrays_[array] = arrays[array];
  return state;
}

void update_window(const UpdateWindow& window, int64_t begin, int64_t end) {
  const StoredState& stored = window.state;
  if (is_plain(stored)) {
    return update_plain(window, plain_state((float*)stored.master, (float* const*)stored.arrays, 0), begin, end);
  }
  const bool by_slice = stored.moments == kInt8 || window.gradient_dtype == kInt8;
  Tile tile;
  for (int64_t at = begin, stop; at < end; at = stop) {
    const int64_t slice_end = (at / stored.length + 1) * stored.length;
    const int64_t whole = update_stored(window, at, by_slice && slice_end < end ? slice_end : end);
    stop = whole;
    if (whole < end && (!by_slice || whole < slice_end)) {
      stop = tile_end(stored, whole, end);
      const int count = (int)(stop - whole);
      // Hazard: the new weights may overwrite those that split masters are made of. They are read first.
      tile.load(stored, whole, count);
      update_plain(window, plain_state(tile.master, tile.arrays, whole), whole, stop);
      tile.store(stored, whole, count, window.random);
    }
  }
}

}  // namespace zenflow

// Applies an update window to the elements [begin, end). Threads may do so at the same time on disjoint ranges.
extern "C" void zenflow_update(const zenflow::UpdateWindow* window, int64_t begin, int64_t end) {
  zenflow::update_window(*window, begin, end);
}

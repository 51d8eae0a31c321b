#include "update_rule.h"

using zenflow::UpdateWindow;

extern "C" {

// Python compares it with its own structure.
int64_t zenflow_window_bytes() { return sizeof(UpdateWindow); }

// Applies an update window to the elements [begin, end). Threads may do so at the same time on disjoint ranges.
void zenflow_update(const UpdateWindow* window, int64_t begin, int64_t end) {
  switch (window->out_dtype) {
    case zenflow::kFloat32: return zenflow::update_any<zenflow::Float32>(*window, begin, end);
    case zenflow::kBFloat16: return zenflow::update_any<zenflow::BFloat16>(*window, begin, end);
    case zenflow::kFloat16: return zenflow::update_any<zenflow::Float16>(*window, begin, end);
  }
}
}

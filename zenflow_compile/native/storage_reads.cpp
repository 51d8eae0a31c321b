// Makes PyTorch raise, with a text, where code asks for the address of a storage, and gives storages memory that PyTorch
// can resize.
//
// Compiled with PyTorch's headers, and used by Python: only builds for CUDA have these functions in torch._C.

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>
#include <utility>

namespace {

// Torch 2.11 has no method that ends the errors. Explicit instantiations may name private members.
template <auto Throws, auto Refresh>
struct Errors {
  friend void end_errors(c10::StorageImpl& storage) {
    storage.*Throws = false;
    (storage.*Refresh)();
  }
};
void end_errors(c10::StorageImpl& storage);
template struct Errors<&c10::StorageImpl::throw_on_immutable_data_ptr_, &c10::StorageImpl::refresh_has_data_ptr_check>;

}  // namespace

extern "C" {

// PyTorch makes views of the `bytes` that the storage shows, and the text is in the error of their reads. Despite the
// method's name the data stays.
void zenflow_refuse_reads(void* storage, int64_t bytes, const char* text) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  impl->set_nbytes(static_cast<size_t>(bytes));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(text));
}

void zenflow_allow_reads(void* storage, int64_t bytes) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  impl->set_nbytes(static_cast<size_t>(bytes));
  end_errors(*impl);
}

// Two storages of one size exchange their memory. PyTorch can resize that of `resizable`.
void zenflow_swap_memory(void* storage, void* resizable) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  auto* other = static_cast<c10::StorageImpl*>(resizable);
  at::DataPtr memory = other->set_data_ptr(at::DataPtr());
  other->set_resizable(false);
  other->set_data_ptr(impl->set_data_ptr(std::move(memory)));
  impl->set_allocator(other->allocator());
  impl->set_resizable(true);
}

}  // extern "C"

// Makes PyTorch raise, with a text, where code asks for the address of a storage that has no memory.
//
// Compiled with PyTorch's headers, and used by Python: only builds for CUDA have these functions in torch._C.

#include <c10/core/StorageImpl.h>

#include <cstdint>
#include <string>

extern "C" {

// The storage is empty, and shows `bytes`: PyTorch makes views of it then, and the text is in the error of their reads.
void zenflow_refuse_reads(void* storage, int64_t bytes, const char* text) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  impl->set_nbytes(static_cast<size_t>(bytes));
  impl->release_data_and_set_meta_custom_data_ptr_error_msg_(std::string(text));
}

// The storage has 0 bytes again.
void zenflow_allow_reads(void* storage) {
  auto* impl = static_cast<c10::StorageImpl*>(storage);
  impl->set_nbytes(static_cast<size_t>(0));
  impl->clear_data_ptr_access_error_msg_();
}

}  // extern "C"

// A simulated accelerator for PyTorch: registrations, and the C functions that Python calls through ctypes.
//
// queues.h     streams, and the thread that runs them in random legal order
// memory.h     device memory, pinned and registered host memory
// device.h     streams, events, generators and hooks as PyTorch wants them
// tensors.h    views of device memory as CPU tensors
// copies.h     copies, with CUDA's rules
// operators.h  the fallback for all operators
// autocast.h   torch.autocast

#include <ATen/Parallel.h>
#include <torch/library.h>

#include "autocast.h"

namespace sim {

void Hooks::resizePrivateUse1Bytes(const c10::Storage& storage, size_t bytes) const {
  resize_storage(storage.unsafeGetStorageImpl(), bytes);
}

namespace {

C10_REGISTER_GUARD_IMPL(PrivateUse1, DeviceGuard)

at::Tensor empty(
    c10::IntArrayRef sizes, std::optional<c10::ScalarType> dtype, std::optional<c10::Layout>,
    std::optional<c10::Device>, std::optional<bool> pin_memory, std::optional<c10::MemoryFormat> format) {
  TORCH_CHECK(!pin_memory.value_or(false), "only dense CPU tensors can be pinned");
  return at::detail::empty_generic(
      sizes, &DeviceAllocator::get(), c10::DispatchKeySet(c10::DispatchKey::PrivateUse1),
      dtype.value_or(c10::get_default_dtype_as_scalartype()), format);
}

at::Tensor empty_strided(
    c10::IntArrayRef sizes, c10::IntArrayRef strides, std::optional<c10::ScalarType> dtype,
    std::optional<c10::Layout>, std::optional<c10::Device>, std::optional<bool> pin_memory) {
  TORCH_CHECK(!pin_memory.value_or(false), "only dense CPU tensors can be pinned");
  return new_tensor(dtype.value_or(c10::get_default_dtype_as_scalartype()), sizes, strides);
}

const at::Tensor& resize_(
    const at::Tensor& self, c10::IntArrayRef sizes, std::optional<c10::MemoryFormat> format) {
  if (self.sizes() != sizes || format.has_value()) resize_tensor(self, sizes, contiguous_strides(sizes));
  if (format.has_value() && *format != c10::MemoryFormat::Preserve) {
    self.unsafeGetTensorImpl()->empty_tensor_restride(*format);
  }
  return self;
}

at::Tensor& set_storage(
    at::Tensor& self, c10::Storage source, int64_t offset, c10::IntArrayRef sizes, c10::IntArrayRef strides) {
  c10::TensorImpl* impl = self.unsafeGetTensorImpl();
  TORCH_CHECK(source.device() == self.device(), "the storage is on ", source.device(), ", the tensor on ", device());
  impl->set_storage_keep_dtype(std::move(source));
  impl->set_storage_offset(offset);
  resize_tensor(self, sizes, strides.size() == sizes.size() ? strides.vec() : contiguous_strides(sizes));
  return self;
}

at::Tensor& set_source_storage(at::Tensor& self, c10::Storage source) {
  const std::vector<int64_t> sizes = {static_cast<int64_t>(source.nbytes() / self.dtype().itemsize())};
  return set_storage(self, std::move(source), 0, sizes, {1});
}

at::Tensor& set_source_tensor(at::Tensor& self, const at::Tensor& source) {
  return set_storage(self, source.storage(), source.storage_offset(), source.sizes().vec(), source.strides().vec());
}

at::Tensor& set_empty(at::Tensor& self) {
  c10::Storage storage(c10::Storage::use_byte_size_t(), 0, &DeviceAllocator::get(), true);
  return set_storage(self, std::move(storage), 0, {0}, {1});
}

void record_stream(at::Tensor& self, c10::Stream stream) {
  DeviceAllocator::get().record_stream(self.storage().data_ptr(), stream.id());
}

// Not by the CPU kernel: it would draw from the CPU's default generator when the executor gets there.
std::tuple<at::Tensor, at::Tensor> native_dropout(const at::Tensor& input, double p, std::optional<bool> train) {
  if (!train.value_or(true)) return {input.clone(), at::empty(input.sizes(), input.options().dtype(at::kBool)).fill_(1)};
  at::Tensor mask = at::empty_like(input).bernoulli_(1 - p);
  at::Tensor output = input.mul(mask).mul_(p == 1 ? 0 : 1 / (1 - p));
  return {output, mask.to(at::kBool)};
}

// Implemented here, so that the fallback must not be registered for them.
const std::set<std::string> kOwnOperators = {
    "aten::empty.memory_format", "aten::empty_strided", "aten::resize_", "aten::set_", "aten::set_.source_Tensor",
    "aten::set_.source_Storage", "aten::set_.source_Storage_storage_offset", "aten::record_stream", "aten::copy_",
    "aten::_copy_from", "aten::_copy_from_and_resize", "aten::native_dropout"};

// Without a CPU kernel of their own, yet not to be taken apart: PrivateUse1 would end in *_overrideable.
const std::set<std::string> kWholeOperators = {"aten::convolution", "aten::convolution_backward"};

TORCH_LIBRARY_IMPL(_, PrivateUse1, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&fallback>()); }

TORCH_LIBRARY_IMPL(aten, PrivateUse1, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("resize_", resize_);
  m.impl("set_", set_empty);
  m.impl("set_.source_Tensor", set_source_tensor);
  m.impl("set_.source_Storage", set_source_storage);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("record_stream", record_stream);
  m.impl("copy_", copy_);
  m.impl("_copy_from", copy_from);
  m.impl("_copy_from_and_resize", copy_from_and_resize);
  m.impl("native_dropout", native_dropout);
  // An operator with a CPU kernel besides a composite one would be taken apart for other devices, with other roundings.
  for (const c10::OperatorName& name : c10::Dispatcher::singleton().getAllOpNames()) {
    if (name.name.rfind("aten::", 0) != 0) continue;
    const std::string full = name.name + (name.overload_name.empty() ? "" : "." + name.overload_name);
    if (kOwnOperators.count(full)) continue;
    auto op = c10::Dispatcher::singleton().findOp(name);
    if (!op || !op->hasSchema()) continue;
    const bool composite = op->hasKernelForDispatchKey(c10::DispatchKey::CompositeImplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutograd) ||
        op->hasKernelForDispatchKey(c10::DispatchKey::CompositeExplicitAutogradNonFunctional);
    if ((composite && op->hasKernelForDispatchKey(c10::DispatchKey::CPU)) || kWholeOperators.count(full)) {
      m.impl(full.c_str(), torch::CppFunction::makeFromBoxedFunction<&fallback>());
    }
  }
}

TORCH_LIBRARY_IMPL(_, AutocastPrivateUse1, m) { m.fallback(torch::CppFunction::makeFallthrough()); }

TORCH_LIBRARY_IMPL(aten, AutocastPrivateUse1, m) {
  for (const char* name : kLowerPrecision) {
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_in_lower_precision>());
  }
  for (const char* name : kFloat32) m.impl(name, torch::CppFunction::makeFromBoxedFunction<&call_in_float32>());
}

// Calls a kernel that takes pointers and integers only: all of them are passed as 64 bits on the platforms we test on.
using Caller = void (*)(void*, const int64_t*);

template <size_t... Index>
void call_kernel_with(void* kernel, const int64_t* arguments, std::index_sequence<Index...>) {
  reinterpret_cast<void (*)(decltype(static_cast<void>(Index), int64_t{})...)>(kernel)(arguments[Index]...);
}

template <size_t... Count>
Caller caller_of(size_t count, std::index_sequence<Count...>) {
  static constexpr Caller callers[] = {[](void* kernel, const int64_t* arguments) {
    call_kernel_with(kernel, arguments, std::make_index_sequence<Count>());
  }...};
  if (count >= sizeof...(Count)) throw std::runtime_error("a kernel with too many arguments");
  return callers[count];
}

// The last error of the calling thread, for Python.
std::string& last_error() {
  static thread_local std::string text;
  return text;
}

template <class Function>
int guarded(Function&& function) {
  try {
    function();
    return 0;
  } catch (const c10::Error& error) {
    last_error() = error.what_without_backtrace();
  } catch (const std::exception& error) {
    last_error() = error.what();
  }
  return 1;
}

uint32_t* host_word(uintptr_t address) {
  auto* word = reinterpret_cast<uint32_t*>(address);
  if (address % sizeof(uint32_t) || !HostMemory::get().contains(word, sizeof *word)) {
    throw std::runtime_error("simulated driver: not an aligned address of pinned or registered host memory");
  }
  return word;
}

std::atomic<bool> has_stream_values{true};

void check_stream_values() {
  if (!has_stream_values) throw std::runtime_error("simulated driver: stream memory operations are not supported");
}

}  // namespace
}  // namespace sim

// All functions that return int return 0, or 1 with a text in sim_last_error().
extern "C" {

using namespace sim;  // NOLINT

const char* sim_last_error() { return last_error().c_str(); }

void sim_start() {
  c10::SetAllocator(c10::DeviceType::PrivateUse1, &DeviceAllocator::get());
  at::RegisterPrivateUse1HooksInterface(new Hooks());
  default_generator();
  // The executor computes with as many threads as the thread that starts it: other numbers give other bits.
  launch("start", [] { at::init_num_threads(); });
}

void sim_stop() { Queues::get().stop(); }

int sim_configure(
    uint64_t seed, uint64_t limit, int in_order, double default_late, double other_late, const int64_t* orders,
    const double* lates, uint64_t late_count, int stream_values, int can_pin, int can_register, uint64_t capacity) {
  return guarded([&] {
    Options options;
    options.seed = seed;
    options.limit = limit;
    options.in_order = in_order;
    options.default_late = default_late;
    options.other_late = other_late;
    for (uint64_t i = 0; i < late_count; ++i) options.late_by_order[orders[i]] = lates[i];
    Queues::get().configure(std::move(options));
    DeviceAllocator::get().configure(capacity);
    HostMemory::get().configure(can_pin, can_register);
    has_stream_values = stream_values;
    Counts::get().clear();
  });
}

int64_t sim_make_stream() { return Queues::get().make_stream(); }
int64_t sim_current_stream() { return current_stream(); }
int64_t sim_exchange_stream(int64_t stream) { return std::exchange(current_stream(), stream); }
int sim_set_late(int64_t stream, double late) {
  return guarded([&] { Queues::get().set_late(stream, late); });
}
int sim_synchronize_stream(int64_t stream) {
  return guarded([&] { synchronize_stream(stream); });
}
int sim_synchronize_device() {
  return guarded([&] { synchronize_device(); });
}
int sim_run_others() {
  return guarded([&] { Queues::get().run_others(); });
}
int sim_run_last(int* ran) {
  return guarded([&] { *ran = Queues::get().run_last(); });
}
int sim_query_stream(int64_t stream, int* done) {
  return guarded([&] { *done = Queues::get().query_stream(stream); });
}

void* sim_make_event(int timed) { return new Event(timed != 0); }
void sim_delete_event(void* event) { delete static_cast<Event*>(event); }
int sim_record_event(void* event, int64_t stream) {
  return guarded([&] { static_cast<Event*>(event)->record(stream); });
}
int sim_wait_event(void* event, int64_t stream) {
  return guarded([&] { static_cast<Event*>(event)->block(stream); });
}
int sim_synchronize_event(void* event) {
  return guarded([&] { static_cast<Event*>(event)->synchronize(); });
}
int sim_query_event(void* event, int* done) {
  return guarded([&] { *done = static_cast<Event*>(event)->query(); });
}
int sim_elapsed_ms(void* begin, void* end, double* ms) {
  return guarded([&] { *ms = static_cast<Event*>(begin)->elapsed_ms(*static_cast<Event*>(end)); });
}

// Other software of the device has these operations also where the driver refuses them to programs: ``inside``.
int sim_write_value(int64_t stream, uintptr_t address, uint32_t value, int inside) {
  return guarded([&] {
    if (!inside) check_stream_values();
    uint32_t* word = host_word(address);
    Item item;
    item.name = "write value";
    item.run = [word, value] { __atomic_store_n(word, value, __ATOMIC_RELEASE); };
    Queues::get().launch(stream, std::move(item));
  });
}

int sim_wait_value(int64_t stream, uintptr_t address, uint32_t value, int inside) {
  return guarded([&] {
    if (!inside) check_stream_values();
    Item item;
    item.name = "wait value";
    item.wait_address = host_word(address);
    item.wait_value = value;
    Queues::get().launch(stream, std::move(item));
  });
}

// As cuLaunchHostFunc: a thread of the driver calls the function, behind the stream's earlier work.
int sim_launch_host_function(void* stream, void (*function)(void*), void* data) {
  return guarded([&] {
    Item item;
    item.name = "host function";
    item.run = [function, data] { function(data); };
    Queues::get().launch(reinterpret_cast<int64_t>(stream), std::move(item));
  });
}

int sim_register(uintptr_t address, uint64_t bytes) {
  return guarded([&] { HostMemory::get().add_range(address, bytes); });
}
int sim_unregister(uintptr_t address) {
  return guarded([&] { HostMemory::get().remove_range(address); });
}
uint64_t sim_registered_bytes() { return HostMemory::get().registered_bytes(); }

// Through ctypes.CDLL it is called without the GIL, through ctypes.PyDLL with it.
int sim_launch_noop(int64_t stream) {
  return guarded([&] {
    Item item;
    item.name = "noop";
    Queues::get().launch(stream, std::move(item));
  });
}

// Queue `kernel(arguments...)` on the current stream. As with pointers on a GPU, nothing keeps their memory.
int sim_launch_kernel(void* kernel, const int64_t* arguments, uint64_t count) {
  return guarded([&] {
    const Caller caller = caller_of(count, std::make_index_sequence<97>());
    launch("generated kernel", [kernel, caller, copied = std::vector<int64_t>(arguments, arguments + count)] {
      caller(kernel, copied.data());
    });
  });
}

void sim_write_when_full(uintptr_t address) { Queues::get().write_when_full(host_word(address)); }
void sim_count_waiting(int change) { Queues::get().count_waiting(change); }
void sim_die(const char* reason) { Queues::get().die(reason); }
void sim_die_after(uint64_t items) { Queues::get().die_after(items); }

void sim_seed(uint64_t seed) {
  std::lock_guard<std::mutex> lock(default_generator().mutex());
  default_generator().set_current_seed(seed);
}
uint64_t sim_initial_seed() { return default_generator().current_seed(); }
uint64_t sim_rng_state_bytes() { return default_generator().get_state().nbytes(); }
void sim_get_rng_state(void* bytes) {
  std::lock_guard<std::mutex> lock(default_generator().mutex());
  const at::Tensor state = default_generator().get_state();
  std::memcpy(bytes, state.const_data_ptr(), state.nbytes());
}
int sim_set_rng_state(const void* bytes) {
  return guarded([&] {
    std::lock_guard<std::mutex> lock(default_generator().mutex());
    at::Tensor state = default_generator().get_state();
    std::memcpy(state.mutable_data_ptr(), bytes, state.nbytes());
    default_generator().set_state(state);
  });
}

uint64_t sim_allocated() { return DeviceAllocator::get().allocated(); }
uint64_t sim_peak() { return DeviceAllocator::get().peak(); }
uint64_t sim_capacity() { return DeviceAllocator::get().capacity(); }
void sim_reset_peak() { DeviceAllocator::get().reset_peak(); }

// Texts are valid until the next call in the same thread.
const char* sim_counts() {
  static thread_local std::string text;
  text.clear();
  for (const auto& [name, count] : Counts::get().copy()) text += std::to_string(count) + " " + name + "\n";
  return text.c_str();
}
void sim_reset_counts() { Counts::get().clear(); }

const char* sim_dump() {
  static thread_local std::string text;
  text = Queues::get().dump();
  return text.c_str();
}
void sim_dump_on_signal(int number, const char* path) { Queues::get().dump_on_signal(number, path); }

}  // extern "C"

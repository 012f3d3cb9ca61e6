// A CUDA device for builds of torch without CUDA: tensors that say they live on "cuda:N" and whose memory is the host's.
// Every operator that has no kernel of its own runs the CPU kernel on the same memory, after checking that all its tensors
// live on one device, as CUDA would.
#include <ATen/core/Tensor.h>
#include <ATen/EmptyTensor.h>
#include <ATen/CPUGeneratorImpl.h>
#include <ATen/detail/CUDAHooksInterface.h>
#include <ATen/native/DispatchStub.h>
#include <ATen/native/transformers/attention.h>
#include <ATen/native/transformers/sdp_utils_cpp.h>
#include <c10/core/impl/DeviceGuardImplInterface.h>
#include <torch/library.h>
#include <new>
#include <mutex>
#include <set>
#include <string>
#include <thread>

namespace {

constexpr int kNumDevices = 8;
thread_local c10::DeviceIndex current = 0;

struct Guard final : c10::impl::DeviceGuardImplInterface {
  c10::DeviceType type() const override { return c10::kCUDA; }
  c10::Device exchangeDevice(c10::Device d) const override {
    auto old = getDevice();
    setDevice(d);
    return old;
  }
  c10::Device getDevice() const override { return {c10::kCUDA, current}; }
  void setDevice(c10::Device d) const override { if (d.has_index()) current = d.index(); }
  void uncheckedSetDevice(c10::Device d) const noexcept override { if (d.has_index()) current = d.index(); }
  c10::Stream getStream(c10::Device d) const override { return c10::Stream(c10::Stream::DEFAULT, d.has_index() ? d : getDevice()); }
  c10::Stream getDefaultStream(c10::Device d) const override { return getStream(d); }
  c10::Stream getStreamFromGlobalPool(c10::Device d, bool) const override { return getStream(d); }
  c10::Stream getNewStream(c10::Device d, int) const override { return getStream(d); }
  c10::Stream exchangeStream(c10::Stream s) const override { return getStream(s.device()); }
  c10::DeviceIndex deviceCount() const noexcept override { return kNumDevices; }
  bool queryStream(const c10::Stream&) const override { return true; }
  void synchronizeStream(const c10::Stream&) const override {}
  void synchronizeDevice(c10::DeviceIndex) const override {}
  void record(void** event, const c10::Stream&, const c10::DeviceIndex, const c10::EventFlag) const override { *event = (void*)1; }
  void block(void*, const c10::Stream&) const override {}
  bool queryEvent(void*) const override { return true; }
  void destroyEvent(void*, const c10::DeviceIndex) const noexcept override {}
  void synchronizeEvent(void*) const override {}
  void recordDataPtrOnStream(const c10::DataPtr&, const c10::Stream&) const override {}
};
C10_REGISTER_GUARD_IMPL(CUDA, Guard)

// A generator of cuda:N, which draws what a CPU generator draws.
struct Generator final : at::CPUGeneratorImpl {
  explicit Generator(c10::DeviceIndex index, uint64_t seed = c10::detail::getNonDeterministicRandom())
      : at::CPUGeneratorImpl(seed) { device_ = c10::Device(c10::kCUDA, index); key_set_ = c10::DispatchKeySet(c10::DispatchKey::CUDA);
      inner = at::make_generator<at::CPUGeneratorImpl>(seed); }
  void set_current_seed(uint64_t seed) override { inner.set_current_seed(seed); }
  uint64_t current_seed() const override { return inner.current_seed(); }
  uint64_t seed() override { return inner.seed(); }
  void set_state(const c10::TensorImpl& s) override { inner.unsafeGetGeneratorImpl()->set_state(s); }
  c10::intrusive_ptr<c10::TensorImpl> get_state() const override { return inner.unsafeGetGeneratorImpl()->get_state(); }
  at::Generator inner;
};

at::Generator& default_generator(c10::DeviceIndex index) {
  static std::vector<at::Generator> all = [] {
    std::vector<at::Generator> made;
    for (int i = 0; i < kNumDevices; i++) made.push_back(at::make_generator<Generator>(i, 67280421310721));
    return made;
  }();
  return all.at(index);
}

struct Hooks final : at::CUDAHooksInterface {
    void init() const override {}
  bool isBuilt() const override { return true; }
  bool isAvailable() const override { return true; }
  bool hasCUDA() const override { return true; }
  bool hasPrimaryContext(c10::DeviceIndex) const override { return true; }
  const at::Generator& getDefaultGenerator(c10::DeviceIndex i) const override { return default_generator(i < 0 ? current : i); }
  at::Generator getNewGenerator(c10::DeviceIndex i) const override { return at::make_generator<Generator>(i < 0 ? current : i); }
  c10::DeviceIndex current_device() const override { return current; }
  int getNumGPUs() const override { return kNumDevices; }
  c10::DeviceIndex deviceCount() const override { return kNumDevices; }
  void setCurrentDevice(c10::DeviceIndex i) const override { current = i; }
  c10::DeviceIndex getCurrentDevice() const override { return current; }
  c10::DeviceIndex exchangeDevice(c10::DeviceIndex i) const override { auto old = current; if (i >= 0) current = i; return old; }
  c10::DeviceIndex maybeExchangeDevice(c10::DeviceIndex i) const override { return exchangeDevice(i); }
  at::Allocator* getPinnedMemoryAllocator() const override { return c10::GetAllocator(c10::kCPU); }
  void deviceSynchronize(c10::DeviceIndex) const override {}
};
static_assert(sizeof(Hooks) == sizeof(at::CUDAHooksInterface));

void let_go(void* context) { delete static_cast<c10::Storage*>(context); }

// The memory of `storage` under another device.
c10::Storage relabelled(const c10::Storage& storage, c10::Device device, c10::Allocator* allocator) {
  auto* kept = new c10::Storage(storage);
  return c10::Storage(c10::Storage::use_byte_size_t(), storage.nbytes(),
                      c10::DataPtr(storage.mutable_data(), kept, &let_go, device), allocator, /*resizable=*/true);
}

struct DeviceAllocator final : c10::Allocator {
  c10::DataPtr allocate(size_t n) override {
    auto ptr = c10::GetAllocator(c10::kCPU)->allocate(n);
    auto* context = ptr.get_context();
    auto* deleter = ptr.get_deleter();
    void* data = ptr.get();
    ptr.release_context();
    return {data, context, deleter, c10::Device(c10::kCUDA, current)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return c10::GetAllocator(c10::kCPU)->raw_deleter(); }
  void copy_data(void* dest, const void* src, std::size_t count) const override { default_copy_data(dest, src, count); }
};
DeviceAllocator device_allocator;

at::Tensor with_storage(const at::Tensor& like, c10::Storage storage, c10::DispatchKey key) {
  auto made = at::detail::make_tensor<c10::TensorImpl>(std::move(storage), c10::DispatchKeySet(key), like.dtype());
  made.unsafeGetTensorImpl()->set_sizes_and_strides(like.sizes(), like.strides(), like.storage_offset());
  return made;
}

at::Tensor on_host(const at::Tensor& x) {
  if (!x.defined() || !x.is_cuda()) return x;
  auto made = with_storage(x, relabelled(x.storage(), c10::kCPU, c10::GetAllocator(c10::kCPU)), c10::DispatchKey::CPU);
  if (x.is_conj()) made._set_conj(true);
  if (x.is_neg()) made._set_neg(true);
  return made;
}

at::Tensor on_device(const at::Tensor& x, c10::Device device) {
  if (!x.defined() || !x.is_cpu()) return x;
  return with_storage(x, relabelled(x.storage(), device, &device_allocator), c10::DispatchKey::CUDA);
}

// What crosses devices by design, and what takes indices of either device.
const std::set<std::string> kAnyDevice = {"aten::copy_", "aten::_copy_from", "aten::index", "aten::index_put_",
                                          "aten::_index_put_impl_", "aten::_unsafe_index"};
// What waits for the device.
const std::set<std::string> kSynchronising = {"aten::_local_scalar_dense", "aten::nonzero", "aten::masked_select", "aten::equal",
                                              "aten::_unique2", "aten::unique_dim", "aten::unique_consecutive"};
// These read CPU scalars of no dims on CUDA, too.
bool takes_host_scalars(const std::string& name) { return name.rfind("aten::_amp", 0) != 0 && name.rfind("aten::_fused", 0) != 0; }

std::mutex lock;
std::vector<std::string> synchronisations;

void note_synchronisation(std::string name) {
  std::lock_guard<std::mutex> held(lock);
  synchronisations.push_back(std::move(name));
}

template <typename F>
void each_tensor(const c10::IValue& value, F&& visit) {
  if (value.isTensor()) visit(value.toTensor());
  else if (value.isTensorList()) for (const auto& x : value.toTensorVector()) visit(x);
  else if (value.isOptionalTensorList()) for (std::optional<at::Tensor> x : value.toOptionalTensorList()) { if (x) visit(*x); }
}

c10::Device device_of(const c10::OperatorHandle& op, at::ArrayRef<c10::IValue> arguments) {
  const auto& name = op.schema().name();
  std::optional<c10::Device> found;
  bool any = kAnyDevice.count(name) != 0, host = false;
  for (const auto& value : arguments) {
    each_tensor(value, [&](const at::Tensor& x) {
      if (!x.defined()) return;
      if (x.is_cuda()) {
        TORCH_CHECK(any || !found || *found == x.device(), "Expected all tensors to be on the same device, but found at least two devices, ",
                    *found, " and ", x.device(), " (in ", name, ")");
        if (!found) found = x.device();
      } else if (x.dim() > 0 || !takes_host_scalars(name)) host = true;
    });
    if (!found && value.isDevice() && value.toDevice().is_cuda()) {
      auto d = value.toDevice();
      found = d.has_index() ? d : c10::Device(c10::kCUDA, current);
    }
  }
  if (!found) found = c10::Device(c10::kCUDA, current);
  TORCH_CHECK(any || !host, "Expected all tensors to be on the same device, but found at least two devices, ", *found, " and cpu! (in ", name, ")");
  return *found;
}

void run_on_host(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const auto& schema = op.schema();
  const size_t num_arguments = schema.arguments().size(), begin = stack->size() - num_arguments;
  std::vector<c10::IValue> given(stack->begin() + begin, stack->end());
  const auto device = device_of(op, given);
  if (kSynchronising.count(schema.name())) note_synchronisation(schema.name());
  if (schema.name() == "aten::copy_" && given[0].toTensor().is_cpu() != given[1].toTensor().is_cpu()) {
    bool blocking = !given[2].toBool();
    if (blocking || given[0].toTensor().is_cpu()) note_synchronisation(given[0].toTensor().is_cpu() ? "to host" : "to device");
  }
  for (size_t i = 0; i < num_arguments; i++) {
    auto& value = (*stack)[begin + i];
    if (value.isTensor()) value = on_host(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& x : value.toTensorVector()) made.push_back(on_host(x));
      value = made;
    } else if (value.isOptionalTensorList()) {
      c10::List<std::optional<at::Tensor>> made;
      for (std::optional<at::Tensor> x : value.toOptionalTensorList()) made.push_back(x ? std::optional<at::Tensor>(on_host(*x)) : x);
      value = made;
    } else if (value.isDevice() && value.toDevice().is_cuda()) value = c10::Device(c10::kCPU);
    else if (schema.arguments()[i].name() == "generator") {
      at::Generator generator = value.isNone() ? default_generator(device.index()) : value.toGenerator();
      TORCH_CHECK(generator.device().is_cuda(), "Expected a 'cuda' device type for generator but found '", generator.device().type(), "'");
      value = static_cast<Generator*>(generator.unsafeGetGeneratorImpl())->inner;
    }
  }
  std::vector<c10::IValue> hosted(stack->begin() + begin, stack->end());
  op.redispatchBoxed(c10::DispatchKeySet(c10::DispatchKey::CPU), stack);
  const size_t first = stack->size() - schema.returns().size();
  for (size_t r = 0; r < schema.returns().size(); r++) {
    auto& value = (*stack)[first + r];
    const auto* alias = schema.returns()[r].alias_info();
    std::optional<size_t> source;
    for (size_t i = 0; alias && i < num_arguments; i++) {
      const auto* of = schema.arguments()[i].alias_info();
      if (of && of->beforeSets() == alias->beforeSets()) source = i;
    }
    if (source && alias->isWrite()) {
      value = given[*source];
      continue;
    }
    auto wrap = [&](const at::Tensor& x) {
      if (source && x.defined()) return with_storage(x, given[*source].toTensor().storage(), c10::DispatchKey::CUDA);
      return on_device(x, device);
    };
    if (value.isTensor()) value = wrap(value.toTensor());
    else if (value.isTensorList()) {
      c10::List<at::Tensor> made;
      for (const auto& x : value.toTensorVector()) made.push_back(wrap(x));
      value = made;
    }
  }
  // An `out=` that was resized: the tensor takes the new memory.
  for (size_t i = 0; i < num_arguments; i++) {
    const auto* alias = schema.arguments()[i].alias_info();
    if (!alias || !alias->isWrite() || !given[i].isTensor() || !given[i].toTensor().is_cuda()) continue;
    const auto& mine = given[i].toTensor();
    const auto& x = hosted[i].toTensor();
    if (mine.sizes() == x.sizes() && mine.strides() == x.strides()) continue;
    auto* impl = mine.unsafeGetTensorImpl();
    impl->set_storage_keep_dtype(relabelled(x.storage(), mine.device(), &device_allocator));
    impl->set_sizes_and_strides(x.sizes(), x.strides(), x.storage_offset());
  }
}

at::Tensor empty(c10::SymIntArrayRef size, std::optional<at::ScalarType> dtype, std::optional<at::Layout>, std::optional<at::Device> device,
                 std::optional<bool>, std::optional<at::MemoryFormat> format) {
  auto old = current;
  if (device && device->has_index()) current = device->index();
  auto made = at::detail::empty_generic(C10_AS_INTARRAYREF_SLOW(size), &device_allocator, c10::DispatchKeySet(c10::DispatchKey::CUDA),
                                        at::dtype_or_default(dtype), format);
  current = old;
  return made;
}

at::Tensor empty_strided(c10::SymIntArrayRef size, c10::SymIntArrayRef stride, std::optional<at::ScalarType> dtype, std::optional<at::Layout>,
                         std::optional<at::Device> device, std::optional<bool>) {
  auto old = current;
  if (device && device->has_index()) current = device->index();
  auto made = at::detail::empty_strided_generic(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), &device_allocator,
                                                c10::DispatchKeySet(c10::DispatchKey::CUDA), at::dtype_or_default(dtype));
  current = old;
  return made;
}

at::Tensor& set_storage(at::Tensor& self, at::Storage source, c10::SymInt offset, c10::SymIntArrayRef size, c10::SymIntArrayRef stride) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source);
  if (stride.empty()) { impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size)); impl->set_storage_offset(offset.expect_int()); }
  else impl->set_sizes_and_strides(C10_AS_INTARRAYREF_SLOW(size), C10_AS_INTARRAYREF_SLOW(stride), offset.expect_int());
  return self;
}

at::Tensor& set_tensor(at::Tensor& self, const at::Tensor& source) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_storage_keep_dtype(source.storage());
  impl->set_sizes_and_strides(source.sizes(), source.strides(), source.storage_offset());
  return self;
}

const at::Tensor& resize(const at::Tensor& self, c10::SymIntArrayRef size, std::optional<at::MemoryFormat>) {
  auto* impl = self.unsafeGetTensorImpl();
  impl->set_sizes_contiguous(C10_AS_INTARRAYREF_SLOW(size));
  size_t needed = (impl->numel() + impl->storage_offset()) * impl->itemsize();
  auto* storage = self.storage().unsafeGetStorageImpl();
  if (storage->nbytes() < needed) {
    auto old = current;
    current = self.device().index();
    auto data = device_allocator.allocate(needed);
    current = old;
    if (storage->nbytes()) memcpy(data.get(), storage->data(), storage->nbytes());
    storage->set_data_ptr_noswap(std::move(data));
    storage->set_nbytes(needed);
  }
  return self;
}

int64_t math_attention(const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, double, bool,
                       std::optional<double>, bool) {
  return static_cast<int64_t>(sdp::SDPBackend::math);
}

int load = [] {
  // torch made its hooks for a build without CUDA when it was imported, and keeps that one object.
  new (const_cast<at::CUDAHooksInterface*>(&at::detail::getCUDAHooks())) Hooks();
  c10::SetAllocator(c10::kCUDA, &device_allocator, 1);
  at::native::_fused_sdp_choice_stub.set_cuda_dispatch_ptr(&math_attention);
  return 0;
}();

}  // namespace

TORCH_LIBRARY_IMPL(_, CUDA, m) { m.fallback(torch::CppFunction::makeFromBoxedFunction<&run_on_host>()); }

TORCH_LIBRARY_IMPL(aten, CUDA, m) {
  m.impl("empty.memory_format", empty);
  m.impl("empty_strided", empty_strided);
  m.impl("set_.source_Storage_storage_offset", set_storage);
  m.impl("set_.source_Tensor", set_tensor);
  m.impl("resize_", resize);
  // Their common kernels choose by device further inside.
  m.impl("convolution_backward", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("copy_", torch::CppFunction::makeFromBoxedFunction<&run_on_host>());
  m.impl("record_stream", [](at::Tensor&, at::Stream) {});
}

TORCH_LIBRARY(fake_cuda, m) {
  m.def("on_host(Tensor x) -> Tensor", on_host);
  m.def("set_device(int index) -> ()", [](int64_t index) { current = static_cast<c10::DeviceIndex>(index); });
  m.def("synchronise() -> ()", []() { note_synchronisation("synchronize"); });
  m.def("default_generator(int index) -> Generator?", [](int64_t index) { return default_generator(static_cast<c10::DeviceIndex>(index)); });
  m.def("device() -> int", []() -> int64_t { return current; });
  m.def("synchronisations() -> str[]", []() {
    std::lock_guard<std::mutex> held(lock);
    return std::exchange(synchronisations, {});
  });
}

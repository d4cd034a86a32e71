// One kernel as a function that Python calls. KERNEL_SOURCE is the file, KERNEL its extern "C" function.
#include KERNEL_SOURCE

#include "launch.h"

namespace entry {

namespace {

template <class... Parameters, size_t... Index>
void call(void (*kernel)(Parameters...), void** arguments, std::index_sequence<Index...>) {
  kernel(*static_cast<std::remove_reference_t<Parameters>*>(arguments[Index])...);
}
template <class... Parameters>
void call(void (*kernel)(Parameters...), void** arguments) {
  call(kernel, arguments, std::index_sequence_for<Parameters...>());
}
template <class... Parameters>
constexpr int count(void (*)(Parameters...)) {
  return sizeof...(Parameters);
}
template <class... Parameters>
void sizes(void (*)(Parameters...), size_t* result) {
  ((*result++ = sizeof(Parameters)), ...);
}

}  // namespace

}  // namespace entry

// The sizes of the kernel's parameters, in bytes, to `result` (room for 64); returns how many there are.
extern "C" __attribute__((visibility("default"))) int parameters(size_t* result) {
  entry::sizes(&::KERNEL, result);
  return entry::count(&::KERNEL);
}

// Runs the kernel. Returns 0, or 1 with the reason in `error`.
extern "C" __attribute__((visibility("default"))) int launch(const emulator::Request* request,
                                                             emulator::Error* error) {
  return emulator::launch([](void** arguments) { entry::call(&::KERNEL, arguments); }, *request, *error);
}

// The machine behind emulator.h: fibers, meetings, pending copies, guarded memory. One launch at a time, one CPU thread.
#include <dlfcn.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/mman.h>
#include <ucontext.h>
#include <unistd.h>

#include <algorithm>
#include <deque>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "launch.h"

// The linker's names for the section of static shared memory; null where a kernel has none.
extern "C" {
extern unsigned char __start_shared_memory[] __attribute__((weak, visibility("hidden")));
extern unsigned char __stop_shared_memory[] __attribute__((weak, visibility("hidden")));
}

namespace emulator {

namespace {

// What memory holds before anything is written: not a number, in float, half and bfloat16.
constexpr unsigned char POISON = 0xff;

constexpr size_t STACK_BYTES = 256 << 10;
constexpr size_t STACK_GUARD_BYTES = 64 << 10;
constexpr size_t GUARD_BYTES = 64 << 20;  // address space only
constexpr size_t ALIGNMENT = 16;          // of the arrays of a launch: the widest access
constexpr size_t SHARED_LIMIT = 227 << 10;
constexpr size_t SHARED_ALIGNMENT = 1024;

size_t round_up(size_t value, size_t step) { return (value + step - 1) / step * step; }

struct Event {
  void (*function)(void*);
  void* state;
  void operator()() const { function(state); }
};

struct Copy {
  void* shared;
  const void* global;
  size_t bytes;  // 0: no copy, an event
  bool valid;
  int group;
  Event event;
};

struct Fiber {
  Place place;
  jmp_buf context;
  ucontext_t start;
  unsigned char* stack = nullptr;
  bool started = false;
  const char* waits_for = nullptr;
  bool (*ready)(void*) = nullptr;  // of wait(): the state belongs to the waiting fiber
  void* ready_state = nullptr;
  std::deque<Copy> copies;
  int group = 0;  // of the next copy
};

}  // namespace

struct Meeting {
  const char* kind = nullptr;
  int expected = 0;
  std::vector<Fiber*> here;
  std::vector<int> slots;  // that hold an argument
  void* arguments[1024] = {};
};

namespace {

struct Block {
  std::vector<std::vector<Fiber*>> ready;  // by warp
  size_t ready_count = 0;
  size_t warp = 0;         // that runs
  bool one_warp_at_once;   // a warp runs as far as it can; else any thread is next
  std::vector<Fiber*> waiting;  // in wait()
  std::map<std::pair<size_t, u32>, Meeting> warps;
  std::map<size_t, Meeting> warpgroups;
  Meeting barriers[16];
  std::vector<Event> events;
  int live = 0;
};

std::vector<std::unique_ptr<Fiber>> fibers;
Fiber* current = nullptr;
std::unique_ptr<Block> block;
void (*kernel_function)(void**) = nullptr;
void** kernel_arguments = nullptr;
u64 random_state = 1;
jmp_buf block_done;
sigjmp_buf failed;
Error* error = nullptr;
bool running = false;

u64 random_bits() {  // xorshift64*, Vigna 2016
  random_state ^= random_state >> 12;
  random_state ^= random_state << 25;
  random_state ^= random_state >> 27;
  return random_state * 0x2545f4914f6cdd1dull >> 16;
}
size_t random_below(size_t bound) { return random_bits() % bound; }

void describe_thread(char* text, size_t size) {
  if (!current) {
    snprintf(text, size, "between blocks");
    return;
  }
  const Place& p = current->place;
  snprintf(text, size, "thread (%u,%u,%u) of block (%u,%u,%u)", p.thread.x, p.thread.y, p.thread.z, p.block.x,
           p.block.y, p.block.z);
}

// ---- Which fiber is next ----

void make_ready(Fiber* fiber) {
  block->ready[fiber->place.index / 32].push_back(fiber);
  block->ready_count++;
}

void land_oldest(Fiber* fiber) {
  Copy copy = fiber->copies.front();
  fiber->copies.pop_front();
  if (copy.bytes == 0) {
    copy.event();
  } else if (copy.valid) {
    memcpy(copy.shared, copy.global, copy.bytes);
  } else {
    memset(copy.shared, 0, copy.bytes);
  }
}

// Lets something happen that happens by itself: an event, or a copy whose landing wakes somebody.
bool something_happens() {
  if (!block->events.empty()) {
    size_t chosen = random_below(block->events.size());
    Event event = block->events[chosen];
    block->events.erase(block->events.begin() + static_cast<ptrdiff_t>(chosen));
    event();
    return true;
  }
  for (auto& fiber : fibers) {
    for (const Copy& copy : fiber->copies) {
      if (copy.bytes == 0) {
        land_oldest(fiber.get());
        return true;
      }
    }
  }
  return false;
}

void wake_waiting() {
  auto& waiting = block->waiting;
  for (size_t i = 0; i < waiting.size();) {
    if (waiting[i]->ready(waiting[i]->ready_state)) {
      make_ready(waiting[i]);
      waiting[i] = waiting.back();
      waiting.pop_back();
    } else {
      i++;
    }
  }
}

[[noreturn]] void fail_deadlock() {
  std::map<std::string, int> reasons;
  int ended = 0, total = 0;
  for (auto& fiber : fibers) {
    if (fiber->waits_for) reasons[fiber->waits_for]++;
  }
  total = static_cast<int>(current->place.block_size.x * current->place.block_size.y * current->place.block_size.z);
  ended = total - block->live;
  std::string text;
  for (auto& [what, count] : reasons) text += (text.empty() ? "" : ", ") + std::to_string(count) + " at " + what;
  fail("deadlock: of %d threads %d have ended and the others wait: %s", total, ended, text.c_str());
}

Fiber* next() {
  if (random_below(16) == 0) {
    something_happens();
    wake_waiting();
  }
  while (block->ready_count == 0) {
    wake_waiting();
    if (block->ready_count == 0 && !something_happens()) {
      wake_waiting();
      if (block->ready_count == 0) fail_deadlock();
    }
  }
  if (!block->one_warp_at_once || block->ready[block->warp].empty()) {
    do {
      block->warp = random_below(block->ready.size());
    } while (block->ready[block->warp].empty());
  }
  auto& ready = block->ready[block->warp];
  size_t chosen = random_below(ready.size());
  Fiber* fiber = ready[chosen];
  ready[chosen] = ready.back();
  ready.pop_back();
  block->ready_count--;
  return fiber;
}

void run_fiber();

// Leaves the running fiber, which somebody makes ready again (or which is done), for the next one.
__attribute__((noinline)) void switch_away() {
  Fiber* from = current;
  Fiber* to = next();
  if (to == from) return;
  if (_setjmp(from->context) != 0) return;
  current = to;
  place = &to->place;
  if (to->started) _longjmp(to->context, 1);
  to->started = true;
  setcontext(&to->start);
}

// A fiber runs its thread of block after block.
void run_fiber() {
  for (;;) {
    kernel_function(kernel_arguments);
    if (--block->live == 0) {
      // A fiber goes on from here in its next block.
      if (_setjmp(current->context) == 0) _longjmp(block_done, 1);
    } else {
      switch_away();
    }
  }
}

unsigned char* map_guarded(size_t bytes, size_t before, size_t after) {
  void* start = mmap(nullptr, before + bytes + after, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (start == MAP_FAILED) return nullptr;
  unsigned char* memory = static_cast<unsigned char*>(start) + before;
  if (bytes > 0 && mprotect(memory, bytes, PROT_READ | PROT_WRITE) != 0) return nullptr;
  return memory;
}

void prepare_fibers(size_t count) {
  while (fibers.size() < count) fibers.push_back(std::make_unique<Fiber>());
  for (size_t i = 0; i < fibers.size(); i++) {
    Fiber& fiber = *fibers[i];
    fiber.waits_for = nullptr;
    fiber.copies.clear();
    fiber.group = 0;
    if (!fiber.stack) fiber.stack = map_guarded(STACK_BYTES, STACK_GUARD_BYTES, 0);
    if (!fiber.stack) fail("no memory for the stacks of %zu threads", count);
  }
}

// Every library of a kernel has fibers of its own, and a process may only map so many regions.
void unmap_stacks() {
  for (auto& fiber : fibers) {
    if (fiber->stack) munmap(fiber->stack - STACK_GUARD_BYTES, STACK_GUARD_BYTES + STACK_BYTES);
    fiber->stack = nullptr;
    fiber->started = false;
  }
}

void start_fiber(Fiber& fiber) {
  getcontext(&fiber.start);
  fiber.start.uc_stack.ss_sp = fiber.stack;
  fiber.start.uc_stack.ss_size = STACK_BYTES;
  fiber.start.uc_link = nullptr;
  makecontext(&fiber.start, run_fiber, 0);
}

// ---- Blocks ----

void poison_shared() {
  memset(dynamic_shared, POISON, round_up(dynamic_shared_bytes, SHARED_ALIGNMENT));
  if (__start_shared_memory) {
    memset(__start_shared_memory, POISON, static_cast<size_t>(__stop_shared_memory - __start_shared_memory));
  }
}

void check_shared() {
  size_t end = round_up(dynamic_shared_bytes, SHARED_ALIGNMENT);
  for (size_t i = dynamic_shared_bytes; i < end; i++) {
    if (dynamic_shared[i] != POISON) fail("writes beyond its %zu bytes of dynamic shared memory", dynamic_shared_bytes);
  }
}

void run_block(dim3 index, dim3 size, dim3 grid) {
  int threads = static_cast<int>(size.x * size.y * size.z);
  block = std::make_unique<Block>();
  block->ready.resize(static_cast<size_t>(threads + 31) / 32);
  block->one_warp_at_once = coin();
  block->live = threads;
  poison_shared();
  prepare_fibers(static_cast<size_t>(threads));
  for (int i = 0; i < threads; i++) {
    Fiber& fiber = *fibers[static_cast<size_t>(i)];
    unsigned u = static_cast<unsigned>(i);
    fiber.place = {{u % size.x, u / size.x % size.y, u / size.x / size.y}, index, size, grid, i};
    if (!fiber.started) start_fiber(fiber);
    make_ready(&fiber);
  }
  if (_setjmp(block_done) == 0) {
    Fiber* first = next();
    current = first;
    place = &first->place;
    if (first->started) _longjmp(first->context, 1);
    first->started = true;
    setcontext(&first->start);
  }
  while (something_happens()) {
  }
  check_shared();
  current = nullptr;
}

void run_grid(const Request& request) {
  u64 blocks = static_cast<u64>(request.grid.x) * request.grid.y * request.grid.z;
  std::vector<u64> order(blocks);
  for (u64 i = 0; i < blocks; i++) order[i] = i;
  for (u64 i = blocks; i > 1; i--) std::swap(order[i - 1], order[random_below(i)]);
  const dim3 grid = request.grid;
  for (u64 i : order) {
    dim3 index = {static_cast<unsigned>(i % grid.x), static_cast<unsigned>(i / grid.x % grid.y),
                  static_cast<unsigned>(i / grid.x / grid.y)};
    run_block(index, request.block, grid);
  }
}

// ---- Global memory: each array of a launch lies against pages that nobody may touch ----

struct Region {
  Argument argument;
  size_t pages = 0;                // bytes mapped
  unsigned char* memory = nullptr;  // the pages
  unsigned char* data = nullptr;    // the array in them
  int position = 0;                // among the kernel's arguments
};
std::vector<Region> regions;

size_t page_bytes() { return static_cast<size_t>(sysconf(_SC_PAGESIZE)); }

Region map_array(const Argument& argument, int position) {
  Region region;
  region.argument = argument;
  region.position = position;
  region.pages = round_up(argument.bytes, page_bytes());
  region.memory = map_guarded(region.pages, GUARD_BYTES, GUARD_BYTES);
  if (!region.memory) fail("no memory for argument %d", position);
  region.data = region.memory + region.pages - round_up(argument.bytes, ALIGNMENT);
  if (region.pages > 0) {
    memset(region.memory, POISON, region.pages);
    memcpy(region.data, argument.data, argument.bytes);
    if (argument.kind == READ_ONLY) mprotect(region.memory, region.pages, PROT_READ);
  }
  return region;
}

void check_array(const Region& region) {
  const unsigned char* end = region.data + region.argument.bytes;
  for (const unsigned char* p = region.memory; p < region.memory + region.pages; p++) {
    if (*p != POISON && (p < region.data || p >= end)) {
      fail("writes %td bytes %s argument %d, an array of %llu bytes", p < region.data ? region.data - p : p - end + 1,
           p < region.data ? "before" : "past", region.position, region.argument.bytes);
    }
  }
}

void unmap_arrays() {
  for (Region& region : regions) munmap(region.memory - GUARD_BYTES, region.pages + 2 * GUARD_BYTES);
  regions.clear();
}

// ---- Faults of the machine become errors of the launch ----

void describe_fault(int signal, const unsigned char* address, char* text, size_t size) {
  if (signal == SIGILL) {
    snprintf(text, size, "a misaligned access, or an index outside of an array");
    return;
  }
  if (signal == SIGFPE) {
    snprintf(text, size, "a division by zero");
    return;
  }
  for (const Region& region : regions) {
    const unsigned char* end = region.data + region.argument.bytes;
    u64 bytes = region.argument.bytes;
    if (address >= region.data && address < end) {
      snprintf(text, size, "writes to argument %d, which is for reading only", region.position);
      return;
    }
    if (address >= end && address < end + GUARD_BYTES) {
      snprintf(text, size, "touches %td bytes past argument %d, an array of %llu bytes", address - end + 1,
               region.position, bytes);
      return;
    }
    if (address < region.data && address >= region.memory - GUARD_BYTES) {
      snprintf(text, size, "touches %td bytes before argument %d, an array of %llu bytes", region.data - address,
               region.position, bytes);
      return;
    }
  }
  if (address >= dynamic_shared - GUARD_BYTES && address < dynamic_shared + SHARED_LIMIT + GUARD_BYTES) {
    snprintf(text, size, "touches byte %td of %zu bytes of dynamic shared memory", address - dynamic_shared,
             dynamic_shared_bytes);
    return;
  }
  snprintf(text, size, "touches address %p, which belongs to nothing", static_cast<const void*>(address));
}

[[noreturn]] void end_launch(const char* what) {
  char where[128];
  describe_thread(where, sizeof where);
  snprintf(error->message, sizeof error->message, "%s (%s)", what, where);
  siglongjmp(failed, 1);
}

// Of an instruction of this library from its start; 0 elsewhere.
u64 library_offset(const void* instruction) {
  Dl_info found, own;
  if (!dladdr(instruction, &found) || !dladdr(&random_state, &own) || found.dli_fbase != own.dli_fbase) return 0;
  return static_cast<u64>(static_cast<const char*>(instruction) - static_cast<const char*>(found.dli_fbase));
}

void on_fault(int signal, siginfo_t* info, void* context) {
  char what[512];
  describe_fault(signal, static_cast<const unsigned char*>(info->si_addr), what, sizeof what);
  const void* instruction = nullptr;
#if defined(__x86_64__) && defined(REG_RIP)
  instruction = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.gregs[REG_RIP]);
#elif defined(__aarch64__)
  instruction = reinterpret_cast<void*>(static_cast<ucontext_t*>(context)->uc_mcontext.pc);
#endif
  error->offset = library_offset(caller ? caller : instruction);
  end_launch(what);
}

const int FAULTS[] = {SIGSEGV, SIGBUS, SIGILL, SIGFPE};

// Catches faults as long as it lives.
class FaultHandlers {
 public:
  FaultHandlers() : stack_(64 << 10) {
    stack_t own = {};
    own.ss_sp = stack_.data();
    own.ss_size = stack_.size();
    sigaltstack(&own, &old_stack_);
    struct sigaction action = {};
    action.sa_sigaction = on_fault;
    action.sa_flags = SA_SIGINFO | SA_ONSTACK;
    sigemptyset(&action.sa_mask);
    for (int i = 0; i < 4; i++) sigaction(FAULTS[i], &action, &old_[i]);
  }
  ~FaultHandlers() {
    for (int i = 0; i < 4; i++) sigaction(FAULTS[i], &old_[i], nullptr);
    sigaltstack(&old_stack_, nullptr);
  }

 private:
  std::vector<unsigned char> stack_;
  stack_t old_stack_;
  struct sigaction old_[4];
};

void check_request(const Request& request) {
  u64 threads = static_cast<u64>(request.block.x) * request.block.y * request.block.z;
  if (threads == 0 || threads > 1024 || threads % 32 != 0) {
    fail("a block of %llu threads: the emulator runs 32 to 1024, in whole warps", threads);
  }
  if (request.grid.x == 0 || request.grid.y == 0 || request.grid.z == 0) fail("an empty grid");
  if (request.grid.y > 65535 || request.grid.z > 65535) fail("a grid beyond 65535 blocks in y or z");
  if (request.shared_bytes > SHARED_LIMIT) fail("%llu bytes of dynamic shared memory", request.shared_bytes);
}

bool map_shared(size_t bytes) {
  static unsigned char* memory = map_guarded(round_up(SHARED_LIMIT, 4096), GUARD_BYTES, GUARD_BYTES);
  if (!memory) return false;
  // Right against the guard, but for the alignment.
  dynamic_shared = memory + round_up(SHARED_LIMIT, 4096) - round_up(bytes, SHARED_ALIGNMENT);
  dynamic_shared_bytes = bytes;
  return true;
}

void run(const Request& request) {
  check_request(request);
  if (!map_shared(request.shared_bytes)) fail("no memory for shared memory");
  static std::vector<void*> pointers;  // static: outlives a longjmp
  static std::vector<void*> parameters;
  pointers.assign(static_cast<size_t>(request.count), nullptr);
  parameters.clear();
  for (int i = 0; i < request.count; i++) {
    const Argument& argument = request.arguments[i];
    if (argument.kind == VALUE) {
      parameters.push_back(argument.data);
      continue;
    }
    if (argument.data) {
      auto same = [&](const Region& region) { return region.argument.data == argument.data; };
      auto found = std::find_if(regions.begin(), regions.end(), same);
      if (found == regions.end()) {
        regions.push_back(map_array(argument, i));
        found = regions.end() - 1;
      }
      pointers[static_cast<size_t>(i)] = found->data;
    }
    parameters.push_back(&pointers[static_cast<size_t>(i)]);
  }
  kernel_arguments = parameters.data();
  run_grid(request);
  for (const Region& region : regions) {
    check_array(region);
    if (region.argument.kind == WRITABLE) memcpy(region.argument.data, region.data, region.argument.bytes);
  }
}

struct HalfValues {
  HalfValues() {
    for (u32 bits = 0; bits < 65536; bits++) {
      u16 element = static_cast<u16>(bits);
      _Float16 half;
      memcpy(&half, &element, 2);
      half_values[bits] = static_cast<float>(half);
    }
  }
} fill_half_values;

}  // namespace

// ---- What emulator.h declares ----

Place* place = nullptr;
const void* caller = nullptr;
unsigned char* dynamic_shared = nullptr;
size_t dynamic_shared_bytes = 0;
float half_values[65536];

void fail(const char* format, ...) {
  char what[768];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(what, sizeof what, format, arguments);
  va_end(arguments);
  error->offset = library_offset(caller ? caller : __builtin_return_address(0));
  end_launch(what);
}

bool coin() { return random_below(2) == 0; }

Meeting& warp_meeting(u32 mask) { return block->warps[{static_cast<size_t>(place->index) / 32, mask}]; }
Meeting& warpgroup_meeting() { return block->warpgroups[static_cast<size_t>(place->index) / 128]; }
Meeting& barrier_meeting(int id) { return block->barriers[id]; }

void meet(Meeting& meeting, int expected, int slot, const char* kind, void* argument, Operation operation) {
  caller = __builtin_return_address(0);
  if (meeting.here.empty()) {
    meeting.kind = kind;
    meeting.expected = expected;
  }
  if (strcmp(meeting.kind, kind) != 0) fail("threads part: some are at %s, some at %s", meeting.kind, kind);
  if (meeting.expected != expected) fail("%s: some expect %d threads, some %d", kind, meeting.expected, expected);
  if (argument) {
    meeting.arguments[slot] = argument;
    meeting.slots.push_back(slot);
  }
  if (static_cast<int>(meeting.here.size()) + 1 < expected) {
    meeting.here.push_back(current);
    current->waits_for = kind;
  } else {
    // The last thread finishes the meeting before anybody can come to the next.
    operation(meeting.arguments);
    for (int used : meeting.slots) meeting.arguments[used] = nullptr;
    meeting.slots.clear();
    for (Fiber* fiber : meeting.here) make_ready(fiber);
    meeting.here.clear();
    make_ready(current);
  }
  switch_away();
  current->waits_for = nullptr;
  caller = nullptr;
}

void wait(const char* what, bool (*ready)(void*), void* state) {
  if (ready(state)) return;
  caller = __builtin_return_address(0);
  current->waits_for = what;
  current->ready = ready;
  current->ready_state = state;
  block->waiting.push_back(current);
  switch_away();
  current->waits_for = nullptr;
  caller = nullptr;
}

void later(void (*event)(void*), void* state) { block->events.push_back({event, state}); }

void copy_async(void* shared, const void* global, size_t bytes, bool valid) {
  caller = __builtin_return_address(0);
  if (reinterpret_cast<uintptr_t>(shared) % bytes != 0 ||
      (valid && reinterpret_cast<uintptr_t>(global) % bytes != 0)) {
    fail("cp_async%zu: an address is not aligned to %zu bytes", bytes, bytes);
  }
  // A bad address faults here, where its thread is known, not when the copy lands.
  if (valid) static_cast<void>(*static_cast<const volatile unsigned char*>(global));
  // Until a copy lands, nobody may count on what was there before.
  memset(shared, POISON, bytes);
  current->copies.push_back({shared, global, bytes, valid, current->group, {}});
  if (coin()) {
    while (!current->copies.empty()) land_oldest(current);
  }
  caller = nullptr;
}

void commit_copies() { current->group++; }

void wait_for_copies(int groups_left) {
  int last = current->group - groups_left;
  while (!current->copies.empty() && current->copies.front().group < last) land_oldest(current);
}

void after_copies(void (*event)(void*), void* state) {
  current->copies.push_back({nullptr, nullptr, 0, true, current->group, {event, state}});
}

int launch(void (*kernel)(void**), const Request& request, Error& result) {
  if (running) {
    snprintf(result.message, sizeof result.message, "a launch is under way in another thread");
    return 1;
  }
  running = true;
  error = &result;
  result.offset = 0;
  caller = nullptr;
  kernel_function = kernel;
  random_state = request.seed * 0x9e3779b97f4a7c15ull + 1;
  int status = 0;
  {
    FaultHandlers handlers;
    if (sigsetjmp(failed, 1) == 0) {
      run(request);
    } else {
      status = 1;
    }
  }
  unmap_arrays();
  unmap_stacks();
  current = nullptr;
  block.reset();
  running = false;
  return status;
}

}  // namespace emulator

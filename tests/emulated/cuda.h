// cuda.h: what CUDA's compiler and a GPU give a kernel, for a C++ compiler and a CPU: threads, barriers, warps, shared memory.
//
// The threads of a block are fibers that run in turn until they wait for others. So everything happens in one order, the same each time;
// blocks run one after another. When all threads that are left wait, the block can never end: that is reported as a deadlock.
//
// What a GPU queues is done at once, or as late as can be: a copy into shared memory when nobody comes further without it (kLateLoads), so
// that what is read too soon shows; or products, and copies from shared memory, when nobody comes further but those who wait for them
// (kLateReads), so that what is overwritten too soon does. With either, warpgroups pause by chance, the same each time.
#pragma once

#include <setjmp.h>
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#define __device__
#define __global__
#define __grid_constant__
#define __launch_bounds__(...)
#define __align__(bytes)
#define __shared__ static
using std::max;
using std::min;

struct Index {
  unsigned x, y, z;
};
struct float2 {
  float x, y;
};
struct alignas(16) float4 {
  float x, y, z, w;
};

namespace emulated {

// ucontext makes a fiber's stack and enters it; from then on _setjmp and _longjmp switch, which leave the signal mask alone: no system
// call.
struct Copy {  // of cp.async: `bytes` from global memory, zeros up to `size`
  unsigned smem;
  const void* global;
  int bytes, size;
};
struct Fiber {
  ucontext_t context;
  jmp_buf place;
  Index thread;
  bool begun = false, done = false;
  int registers;
  std::vector<std::function<void()>> stores;                 // copies from shared memory, queued
  std::vector<std::vector<std::function<void()>>> products;  // groups of products, queued; the last one is open
  std::vector<std::vector<Copy>> groups;                     // of cp.async, queued
  std::vector<Copy> group;                                   // that is open
};
inline std::vector<Fiber> fibers;
inline Fiber* current;
inline Index* thread;
inline Index block, grid;
inline ucontext_t first_entry;
inline jmp_buf scheduler;

inline void resume(Fiber& fiber) {
  current = &fiber;
  thread = &fiber.thread;
  if (_setjmp(scheduler) != 0) return;
  if (fiber.begun) _longjmp(fiber.place, 1);
  fiber.begun = true;
  swapcontext(&first_entry, &fiber.context);
}
inline void pause_fiber() {
  if (_setjmp(current->place) == 0) _longjmp(scheduler, 1);
}
enum Order { kAtOnce, kLateLoads, kLateReads };
inline Order order;
struct Slow {
  int waiting;  // for nobody to come further
  long quiet;   // how often that was
};
inline Slow products, stores;                      // stores are the slower ones
inline std::vector<std::function<void()>> copies;  // into shared memory, on their way
inline long progress;                              // how often somebody came further
inline std::string waits_for;                      // what the last one that waited waits for
inline int registers_free;                         // of those the block was launched with
alignas(1024) inline char smem[228 << 10];         // of the block; shared addresses are offsets from here

// What a kernel does that would hang or fault on a GPU.
struct Failure {
  std::string what;
};

template <class Condition>
void wait_until(Condition condition, const char* what) {
  while (!condition()) {
    waits_for = what;
    pause_fiber();
  }
  ++progress;
}

// A barrier of `count` threads, again and again.
struct Barrier {
  int arrived = 0;
  long passed = 0;
  void arrive(int count) {
    if (++arrived == count) {
      arrived = 0;
      ++passed;
      ++progress;
    }
  }
  void sync(int count, const char* what) {
    const long mine = passed;
    arrive(count);
    wait_until([&] { return passed != mine; }, what);
  }
};
inline Barrier whole_block, warps[32];
inline std::map<int, Barrier> named;
inline void sync_warp() { warps[thread->x / 32].sync(32, "the lanes of its warp"); }

// mbarrier: a phase ends when `count` have arrived and all announced bytes have come.
struct PhaseBarrier {
  int count, pending;
  long bytes;
  unsigned phase;
  void advance() {
    if (pending < 0) throw Failure{"an mbarrier has more arrivals than it was initialised for"};
    if (pending > 0 || bytes != 0) return;
    phase ^= 1;
    pending = count;
    ++progress;
  }
};
inline std::map<unsigned, PhaseBarrier> phases;

// What a thread shows the others of its warp.
inline unsigned long long shown[1024][4];
template <class T>
T of_lane(T x, int lane) {
  static_assert(sizeof(T) <= 8);
  const unsigned t = thread->x;
  shown[t][0] = 0;
  std::memcpy(&shown[t][0], &x, sizeof x);
  sync_warp();
  std::memcpy(&x, &shown[t / 32 * 32 + lane][0], sizeof x);
  sync_warp();
  return x;
}

// Does something now, or later where that is the order.
template <class Work>
void queue(Order late, std::vector<std::function<void()>>& work, Work what) {
  if (order == late) {
    work.emplace_back(what);
  } else {
    what();
  }
}
// Waits until nobody comes further, as somebody slow would.
inline void be_slow(Slow& kind) {
  if (order != kLateReads) return;
  const long before = kind.quiet;
  ++kind.waiting;
  wait_until([&] { return kind.quiet != before; }, "its turn");
  --kind.waiting;
}
inline void finish(std::vector<std::function<void()>>& work) {
  std::vector<std::function<void()>> now;
  now.swap(work);
  for (auto& what : now) what();
}

// Runs `kernel` on each thread of each block; returns what went wrong, or "".
template <class Kernel>
std::string run(int blocks, int threads, Kernel kernel) {
  constexpr size_t kStack = 256 << 10;
  const std::unique_ptr<char[]> stacks(new char[kStack * threads]);  // not kept: a process loads hundreds of kernels, and each has its own
  static std::function<void()> body;
  static std::string failure;
  body = kernel;
  failure.clear();
  grid = {static_cast<unsigned>(blocks), 1, 1};
  for (int n = 0; n < blocks && failure.empty(); ++n) {
    const int b = order == kLateReads ? blocks - 1 - n : n;  // a GPU promises no order
    block = {static_cast<unsigned>(b), 0, 0};
    whole_block = {};
    std::fill(std::begin(warps), std::end(warps), Barrier{});
    named.clear();
    phases.clear();
    copies.clear();
    products = stores = {};
    std::memset(smem, 0xff, sizeof smem);  // NaN
    registers_free = 0;
    fibers.assign(threads, Fiber{});
    for (int t = 0; t < threads; ++t) {
      Fiber& fiber = fibers[t];
      fiber.thread = {static_cast<unsigned>(t), 0, 0};
      fiber.registers = 65536 / threads / 8 * 8;
      getcontext(&fiber.context);
      fiber.context.uc_stack.ss_sp = stacks.get() + kStack * t;
      fiber.context.uc_stack.ss_size = kStack;
      fiber.context.uc_link = nullptr;
      makecontext(
          &fiber.context,
          +[] {
            try {
              body();
              finish(current->stores);
            } catch (const Failure& e) {
              failure = e.what;
            }
            current->done = true;
            ++progress;
            pause_fiber();
          },
          0);
    }
    unsigned chance = 12345u + b, paused = 0;  // a bit for each warpgroup
    int round = 0;
    for (int left = threads; left > 0 && failure.empty(); ++round) {
      const long before = progress;
      if (order != kAtOnce && round % 16 == 0) paused = (chance = chance * 1664525u + 1013904223u) >> 24;
      left = 0;
      for (Fiber& fiber : fibers) {
        if (fiber.done || !failure.empty()) continue;
        ++left;
        if (paused >> fiber.thread.x / 128 & 1) continue;
        resume(fiber);
        left -= fiber.done;
      }
      if (left > 0 && progress == before && paused != 0) {
        paused = 0;
        round = 0;
        continue;
      }
      if (left > 0 && progress == before && !copies.empty()) {
        const auto copy = copies.front();
        copies.erase(copies.begin());
        copy();
        ++progress;
      } else if (left > 0 && progress == before && failure.empty() && products.waiting + stores.waiting > 0) {
        ++(products.waiting > 0 ? products : stores).quiet;
        ++progress;
      }
      if (left > 0 && progress == before && failure.empty())
        failure = "deadlock: " + std::to_string(left) + " threads of block " + std::to_string(b) + " wait, one for " + waits_for;
    }
  }
  return failure;
}

}  // namespace emulated

#define threadIdx (*emulated::thread)
#define blockIdx emulated::block
#define gridDim emulated::grid

inline void __syncthreads() { emulated::whole_block.sync(static_cast<int>(emulated::fibers.size()), "__syncthreads"); }
inline void __threadfence() {}
inline void __syncwarp(unsigned = 0) { emulated::sync_warp(); }
template <class T>
T __shfl_sync(unsigned, T x, int lane) {
  return emulated::of_lane(x, lane % 32);
}
template <class T>
T __shfl_xor_sync(unsigned, T x, int mask) {
  return emulated::of_lane(x, threadIdx.x % 32 ^ mask);
}
template <class T>
T __shfl_up_sync(unsigned, T x, int distance) {
  const int lane = threadIdx.x % 32;
  return emulated::of_lane(x, lane >= distance ? lane - distance : lane);
}
inline unsigned __ballot_sync(unsigned, bool x) {
  const unsigned t = threadIdx.x;
  unsigned ballot = 0;
  emulated::shown[t][0] = x;
  emulated::sync_warp();
  for (int lane = 0; lane < 32; ++lane) ballot |= static_cast<unsigned>(emulated::shown[t / 32 * 32 + lane][0]) << lane;
  emulated::sync_warp();
  return ballot;
}
inline bool __any_sync(unsigned, bool x) { return __ballot_sync(0, x) != 0; }
inline bool __all_sync(unsigned, bool x) { return __ballot_sync(0, x) == 0xffffffffu; }

inline unsigned __byte_perm(unsigned low, unsigned high, unsigned selector) {
  const unsigned long long bytes = static_cast<unsigned long long>(high) << 32 | low;
  unsigned x = 0;
  for (int n = 0; n < 4; ++n) x |= static_cast<unsigned>(bytes >> (selector >> 4 * n & 7) * 8 & 0xff) << 8 * n;
  return x;
}
inline float __fdividef(float a, float b) { return a / b; }
inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned>(static_cast<unsigned long long>(a) * b >> 32); }
template <class T>
T atomicAdd(T* p, T x) {
  const T old = *p;
  *p += x;
  return old;
}
inline unsigned atomicOr(unsigned* p, unsigned x) {
  const unsigned old = *p;
  *p |= x;
  return old;
}
template <class To, class From>
To bits_of(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  std::memcpy(&y, &x, sizeof x);
  return y;
}
inline int __float_as_int(float x) { return bits_of<int>(x); }
inline unsigned __float_as_uint(float x) { return bits_of<unsigned>(x); }
inline float __int_as_float(int x) { return bits_of<float>(x); }
inline float __uint_as_float(unsigned x) { return bits_of<float>(x); }
inline double __longlong_as_double(long long x) { return bits_of<double>(x); }
inline float __fmul_rn(float x, float y) { return x * y; }  // compiled without contraction, as all here
inline double __dmul_rn(double x, double y) { return x * y; }
inline int __ffs(unsigned x) { return __builtin_ffs(static_cast<int>(x)); }

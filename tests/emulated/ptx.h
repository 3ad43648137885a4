// ptx.h: the functions of cuda_src/primitives/ptx.cuh, and the warpgroup products that jit.py generates, on the CPU.
//
// Copies by cp.async are done at once, those by the accelerator and products at once or late (cuda.h). What memory fences are for is not
// found here. Everything else is: addresses, layouts, swizzles, descriptors, who waits for whom. The layouts are those of the PTX ISA 8.x,
// sections on mma.m16n8k16, ldmatrix, wgmma and 128-byte swizzle.
namespace cupyflash {

// --- numbers ---------------------------------------------------------------------------------------------------------------------------

inline float as_float(unsigned bits, BFloat16) { return bits_of<float>((bits & 0xffff) << 16); }
inline float as_float(unsigned bits, Half) { return static_cast<float>(bits_of<_Float16>(static_cast<unsigned short>(bits))); }
inline unsigned as_bits(float x, BFloat16 e) {
  narrow(x, e);
  return e.bits;
}
inline unsigned as_bits(float x, Half) { return bits_of<unsigned short>(static_cast<_Float16>(x)); }

template <class Element>
unsigned pack(float low, float high, Element e) {
  return as_bits(low, e) | as_bits(high, e) << 16;
}
template <class Element>
unsigned fma_pair(unsigned a, unsigned b, unsigned c, Element e) {
  return pack(as_float(a, e) * as_float(b, e) + as_float(c, e), as_float(a >> 16, e) * as_float(b >> 16, e) + as_float(c >> 16, e), e);
}
inline void widen_e4m3(unsigned (&pairs)[2], unsigned x) {
  auto wide = [&](int n) {
    const int code = x >> 8 * n & 0x7f;
    const float size = code == 0x7f ? NAN : code < 8 ? std::ldexp(code, -9) : std::ldexp(8 + code % 8, code / 8 - 10);
    return x >> 8 * n & 0x80 ? -size : size;
  };
  for (int n = 0; n < 2; ++n) pairs[n] = pack(wide(2 * n), wide(2 * n + 1), Half{});
}
inline float flushed(float x) { return std::fabs(x) < 1.17549435e-38f ? 0.0f : x; }
inline float ex2(float x) { return flushed(std::exp2(x)); }
inline float rcp(float x) { return 1.0f / x; }
inline unsigned opaque(unsigned x) { return x; }
inline void stay_branch() {}
inline int uniform(int x) {
  const int first = __shfl_sync(0, x, 0);
  if (x != first) throw emulated::Failure{"uniform(x) of lanes that differ"};
  return first;
}

// --- memory ----------------------------------------------------------------------------------------------------------------------------

inline unsigned smem_address(const void* p) { return static_cast<unsigned>(static_cast<const char*>(p) - emulated::smem); }
inline void carry_out(const emulated::Copy& copy) {
  std::memset(emulated::smem + copy.smem, 0, copy.size);
  if (copy.bytes > 0) std::memcpy(emulated::smem + copy.smem, copy.global, copy.bytes);
}
inline void cp_async(const emulated::Copy& copy) {  // as late as it may come: when its group is waited for
  if (emulated::order == emulated::kLateLoads) {
    emulated::current->group.push_back(copy);
  } else {
    carry_out(copy);
  }
}
inline void cp_async_16(unsigned smem, const void* global, int bytes) { cp_async({smem, global, bytes, 16}); }
inline void cp_async_4(unsigned smem, const float* global, bool exists) { cp_async({smem, global, exists ? 4 : 0, 4}); }
inline void cp_async_commit() { emulated::current->groups.push_back(std::move(emulated::current->group)); }
template <int kPending>
void cp_async_wait() {
  auto& groups = emulated::current->groups;
  for (; groups.size() > kPending; groups.erase(groups.begin())) {
    for (const auto& copy : groups.front()) carry_out(copy);
  }
}
inline void smem_store(unsigned smem, unsigned x) { std::memcpy(emulated::smem + smem, &x, 4); }
inline void red_add(float* global, float x) { *global += x; }
inline void red_add_4(float* global, const float (&x)[4]) {
  for (int n = 0; n < 4; ++n) global[n] += x[n];
}
inline void global_load_16(unsigned (&x)[4], const void* global) { std::memcpy(x, global, 16); }
inline int count_up(int* global) { return (*global)++; }
inline float global_load_l2(const float* global) { return *global; }
inline void global_load_l2_4(float (&x)[4], const float* global) { std::memcpy(x, global, 16); }
inline void global_store_16(void* global, const unsigned (&x)[4]) { std::memcpy(global, x, 16); }

// --- warps: ldmatrix, stmatrix, mma ----------------------------------------------------------------------------------------------------

// Calls f(n, address): where this lane's pair of tile n lies, or with kTrans its two elements, one below the other.
template <bool kTrans, class Move>
void move_matrices(unsigned smem, Move move) {
  const unsigned t = threadIdx.x, lane = t % 32;
  emulated::shown[t][0] = smem;
  emulated::sync_warp();
  for (int n = 0; n < 4; ++n) {
    auto row = [&](int r) { return emulated::smem + emulated::shown[t / 32 * 32 + n * 8 + r][0]; };
    if (kTrans) {
      move(n, row(lane % 4 * 2) + lane / 4 * 2, row(lane % 4 * 2 + 1) + lane / 4 * 2);
    } else {
      move(n, row(lane / 4) + lane % 4 * 4, row(lane / 4) + lane % 4 * 4 + 2);
    }
  }
  emulated::sync_warp();
}
template <bool kTrans>
void load_matrices(unsigned (&r)[4], unsigned smem) {
  move_matrices<kTrans>(smem, [&](int n, const char* low, const char* high) {
    unsigned short pair[2];
    std::memcpy(&pair[0], low, 2);
    std::memcpy(&pair[1], high, 2);
    r[n] = pair[0] | static_cast<unsigned>(pair[1]) << 16;
  });
}
template <bool kTrans>
void store_matrices(unsigned smem, const unsigned (&r)[4]) {
  move_matrices<kTrans>(smem, [&](int n, char* low, char* high) {
    std::memcpy(low, &r[n], 2);
    std::memcpy(high, reinterpret_cast<const char*>(&r[n]) + 2, 2);
  });
}
inline void ldmatrix_x4(unsigned (&r)[4], unsigned smem) { load_matrices<false>(r, smem); }
inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned smem) { load_matrices<true>(r, smem); }
inline void stmatrix_x4(unsigned smem, const unsigned (&r)[4]) { store_matrices<false>(smem, r); }
inline void stmatrix_x4_trans(unsigned smem, const unsigned (&r)[4]) { store_matrices<true>(smem, r); }

// The two rows of a 16 x 16 left operand that a lane's results need.
template <class Element>
void left_rows(const unsigned (&a)[4], float (&rows)[2][16], Element e) {
  const unsigned t = threadIdx.x, quad = t / 4 * 4;
  for (int n = 0; n < 4; ++n) emulated::shown[t][n] = a[n];
  emulated::sync_warp();
  for (int r = 0; r < 2; ++r) {
    for (int k = 0; k < 16; ++k)
      rows[r][k] = as_float(static_cast<unsigned>(emulated::shown[quad + k % 8 / 2][r + k / 8 * 2]) >> k % 2 * 16, e);
  }
  emulated::sync_warp();
}
template <class Element>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Element e) {
  const unsigned t = threadIdx.x;
  float rows[2][16];
  left_rows(a, rows, e);
  emulated::shown[t][0] = b0;
  emulated::shown[t][1] = b1;
  emulated::sync_warp();
  for (int i = 0; i < 4; ++i) {
    const unsigned column = t / 32 * 32 + (t % 4 * 2 + i % 2) * 4;
    for (int k = 0; k < 16; ++k)
      d[i] += rows[i / 2][k] * as_float(static_cast<unsigned>(emulated::shown[column + k % 8 / 2][k / 8]) >> k % 2 * 16, e);
  }
  emulated::sync_warp();
}
template <class Element>
void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float upper, float lower, Element e) {
  d[0] = d[1] = upper;
  d[2] = d[3] = lower;
  mma_m16n8k16(d, a, b0, b1, e);
}

// --- sm_90a ----------------------------------------------------------------------------------------------------------------------------

inline emulated::PhaseBarrier& phase_barrier(unsigned barrier) {
  const auto found = emulated::phases.find(barrier);
  if (found == emulated::phases.end()) throw emulated::Failure{"an mbarrier that was not initialised"};
  return found->second;
}
inline void mbarrier_init(unsigned barrier, int count) { emulated::phases[barrier] = {count, count, 0, 0}; }
inline void mbarrier_init_fence() {}
inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
  auto& b = phase_barrier(barrier);
  b.bytes += bytes;
  --b.pending;
  b.advance();
}
inline void mbarrier_arrive(unsigned barrier) { mbarrier_arrive_expect(barrier, 0); }
inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  auto& b = phase_barrier(barrier);
  emulated::wait_until([&] { return b.phase != parity; }, "an mbarrier");
}
inline void named_barrier_sync(int barrier, int threads) { emulated::named[barrier].sync(threads, "a named barrier"); }
inline void named_barrier_arrive(int barrier, int threads) { emulated::named[barrier].arrive(threads); }
template <int kCount>
void registers_give() {
  const int more = emulated::current->registers - kCount;
  if (more < 0) throw emulated::Failure{"registers given that the warp does not have"};
  emulated::registers_free += more;
  emulated::current->registers = kCount;
}
template <int kCount>
void registers_take() {
  const int more = kCount - emulated::current->registers;
  emulated::wait_until([&] { return emulated::registers_free >= more; }, "registers");
  emulated::registers_free -= more;
  emulated::current->registers = kCount;
}

// 128-byte swizzle: bits 4 to 6 of an address change with bits 7 to 9.
inline unsigned swizzled(unsigned address) { return address ^ (address >> 7 & 7) << 4; }

// What `encode` in emulator.py writes in place of a tensor map: 64 columns and `rows` rows at once; strides in bytes.
struct BoxMap {
  char* data;
  long long size[4], stride[4];
  int rows;
};
template <class Move>
void for_box(unsigned smem, const BoxMap& map, int x, int y, int z, int w, Move move) {
  if (smem % 128 != 0) throw emulated::Failure{"a tensor copy that does not start at 128 bytes"};
  for (int r = 0; r < map.rows; ++r) {
    for (int c = 0; c < 64; ++c) {
      const long long at[4] = {x + c, y + r, z, w};
      char* global = map.data;
      for (int axis = 0; axis < 4; ++axis) {
        if (at[axis] < 0 || at[axis] >= map.size[axis]) global = nullptr;
        if (global) global += at[axis] * map.stride[axis];
      }
      move(emulated::smem + swizzled(smem + r * 128 + c * 2), global);
    }
  }
}
inline void prefetch_map(const void*) {}
inline void tma_prefetch(const void*, int, int, int, int) {}
inline void tma_load(unsigned smem, const void* map, unsigned barrier, int x, int y, int z, int w) {
  emulated::queue(emulated::kLateLoads, emulated::copies, [=] {
    const auto& box = *static_cast<const BoxMap*>(map);
    for_box(smem, box, x, y, z, w, [](char* shared, const char* global) {
      if (global) {
        std::memcpy(shared, global, 2);
      } else {
        std::memset(shared, 0, 2);
      }
    });
    auto& b = phase_barrier(barrier);
    b.bytes -= box.rows * 128;
    b.advance();
  });
}
inline void tma_store(unsigned smem, const void* map, int x, int y, int z, int w) {
  // Loads may begin before an array, stores may not (CUDA C++ Programming Guide, "Tensor Memory Accelerator"): an illegal instruction.
  if (x < 0 || y < 0 || z < 0 || w < 0) throw emulated::Failure{"a tensor store that begins before the array"};
  emulated::queue(emulated::kLateReads, emulated::current->stores, [=] {
    for_box(smem, *static_cast<const BoxMap*>(map), x, y, z, w, [](const char* shared, char* global) {
      if (global) std::memcpy(global, shared, 2);
    });
  });
}
inline void bulk_add(float* global, unsigned shared, int num_bytes) {
  emulated::queue(emulated::kLateReads, emulated::current->stores, [=] {
    const auto* x = reinterpret_cast<const float*>(emulated::smem + shared);
    for (int n = 0; n < num_bytes / 4; ++n) global[n] += x[n];
  });
}
inline void bulk_commit() {}
inline void bulk_wait_read() {
  if (!emulated::current->stores.empty()) emulated::be_slow(emulated::stores);
  emulated::finish(emulated::current->stores);
}
inline void bulk_wait() { bulk_wait_read(); }
inline void fence_async_proxy() {}

// Products of the thread, in groups.
inline std::vector<std::function<void()>>& open_group() {
  auto& groups = emulated::current->products;
  if (groups.empty()) groups.emplace_back();
  return groups.back();
}
inline void wgmma_fence() {}
inline void wgmma_commit() {
  open_group();
  emulated::current->products.emplace_back();
}
template <int kPending>
void wgmma_wait() {
  auto& groups = emulated::current->products;
  if (groups.size() > kPending + 1) emulated::be_slow(emulated::products);
  while (groups.size() > kPending + 1) {
    auto oldest = groups.front();
    groups.erase(groups.begin());
    emulated::finish(oldest);
  }
}

// An element of a matrix that a descriptor names: row by row with its columns along the reduction, or, transposed, with its rows along it
// and panels of 64 columns.
template <class Element>
float element_of(unsigned long long matrix, int row, int column, Element e) {
  const unsigned start = (matrix & 0x3fff) << 4;
  const unsigned address = start + row / 8 * ((matrix >> 32 & 0x3fff) << 4) + row % 8 * 128 + column * 2;
  return as_float(*reinterpret_cast<unsigned short*>(emulated::smem + swizzled(address)), e);
}
template <class Element>
float element_of_panels(unsigned long long matrix, int row, int column, Element e) {
  const unsigned start = (matrix & 0x3fff) << 4;
  const unsigned address = start + column / 64 * ((matrix >> 16 & 0x3fff) << 4) + row / 8 * 1024 + row % 8 * 128 + column % 64 * 2;
  return as_float(*reinterpret_cast<unsigned short*>(emulated::smem + swizzled(address)), e);
}
// D (64 x 8 kTiles) (+)= A B, where `a` has the two rows of this lane and b(k, n) an element.
template <int kTiles, class Right>
void multiply_rows(float (&d)[kTiles][4], const float (&a)[2][16], Right b, int accumulate) {
  const int lane = threadIdx.x % 32;
  for (int n = 0; n < kTiles; ++n) {
    for (int i = 0; i < 4; ++i) {
      float sum = accumulate ? d[n][i] : 0.0f;
      for (int k = 0; k < 16; ++k) sum += a[i / 2][k] * b(k, 8 * n + lane % 4 * 2 + i % 2);
      d[n][i] = sum;
    }
  }
}
template <class Element>
void rows_in_memory(unsigned long long matrix, float (&rows)[2][16], Element e) {
  const int row = threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4;
  for (int r = 0; r < 2; ++r) {
    for (int k = 0; k < 16; ++k) rows[r][k] = element_of(matrix, row + 8 * r, k, e);
  }
}
template <int kTiles, class Element, class Right>
void wgmma_in_memory(float (&d)[kTiles][4], unsigned long long a, int accumulate, Element e, Right right) {
  emulated::queue(emulated::kLateReads, open_group(), [=, &d] {
    float rows[2][16];
    rows_in_memory(a, rows, e);
    multiply_rows(d, rows, right, accumulate);
  });
}
template <int kTiles, class Element>
void wgmma_ss(float (&d)[kTiles][4], unsigned long long a, unsigned long long b, int accumulate, Element e) {
  wgmma_in_memory(d, a, accumulate, e, [=](int k, int n) { return element_of(b, n, k, e); });
}
template <int kTiles, class Element>
void wgmma_ss_t(float (&d)[kTiles][4], unsigned long long a, unsigned long long b, int accumulate, Element e) {
  wgmma_in_memory(d, a, accumulate, e, [=](int k, int n) { return element_of_panels(b, k, n, e); });
}
template <int kTiles, class Element>
void wgmma_rs(float (&d)[kTiles][4], const unsigned (&a)[4], unsigned long long b, int accumulate, Element e) {
  emulated::queue(emulated::kLateReads, open_group(), [=, &d, &a] {
    float rows[2][16];
    left_rows(a, rows, e);
    multiply_rows(d, rows, [&](int k, int n) { return element_of_panels(b, k, n, e); }, accumulate);
  });
}

}  // namespace cupyflash

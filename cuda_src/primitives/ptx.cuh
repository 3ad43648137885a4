// ptx.cuh: one function for one PTX instruction; with types.cuh the only file with asm. Shared addresses are 32-bit.
#pragma once

#include "types.cuh"

namespace cupyflash {

__device__ inline unsigned smem_address(const void* pointer) { return static_cast<unsigned>(__cvta_generic_to_shared(pointer)); }

// Scope: thread. Copies `bytes` (0 to 16) from global memory and fills the rest of 16 with zeros; ordered by cp_async_wait.
__device__ inline void cp_async_16(unsigned smem, const void* global, int bytes) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(smem), "l"(global), "r"(bytes) : "memory");
}
// The same for one float, or for zero.
__device__ inline void cp_async_4(unsigned smem, const float* global, bool exists) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(smem), "l"(global), "r"(exists ? 4 : 0) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// Waits until at most kPending of this thread's groups are on their way; a barrier must follow for the other threads' copies.
template <int kPending>
__device__ inline void cp_async_wait() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kPending) : "memory");
}

// Scope: warp. Four 8x8 tiles of 16-bit elements; lane l gives the address of row l % 8 of tile l / 8. Volatile orders it against the
// barriers; a memory clobber would keep plain loads in place around it as well.
__device__ inline void ldmatrix_x4(unsigned (&r)[4], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}
__device__ inline void ldmatrix_x4_trans(unsigned (&r)[4], unsigned smem) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(smem));
}

// Scope: thread. Ordered by volatile, as ldmatrix.
__device__ inline void smem_store(unsigned smem, unsigned x) { asm volatile("st.shared.b32 [%0], %1;" ::"r"(smem), "r"(x)); }

// Scope: warp. sm_90: what ldmatrix_x4 reads, written.
__device__ inline void stmatrix_x4(unsigned smem, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r[0]), "r"(r[1]), "r"(r[2]), "r"(r[3]));
}
// The same for tiles that lie transposed in the registers.
__device__ inline void stmatrix_x4_trans(unsigned smem, const unsigned (&r)[4]) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(smem), "r"(r[0]), "r"(r[1]), "r"(r[2]),
               "r"(r[3])
               : "memory");
}

// Scope: warp. D (16 x 8, float) += A (16 x 16, row-major) B (16 x 8, column-major).
__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// D = A B + C, where C has one value in the lane's upper row, l / 4, and one in its lower one.
__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float upper, float lower, Half) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %11, %11};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(upper), "f"(lower));
}
__device__ inline void mma_m16n8k16(float (&d)[4], const unsigned (&a)[4], unsigned b0, unsigned b1, float upper, float lower, BFloat16) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%10, %10, %11, %11};"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(upper), "f"(lower));
}

// Two floats to two 16-bit elements, the first in the low half.
__device__ inline unsigned pack(float low, float high, Half) {
  unsigned packed;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}
__device__ inline unsigned pack(float low, float high, BFloat16) {
  unsigned packed;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
  return packed;
}

// Four numbers of e4m3 as fp16, two a register (sm_89).
__device__ inline void widen_e4m3(unsigned (&pairs)[2], unsigned x) {
  asm("{ .reg .b16 low, high;\nmov.b32 {low, high}, %2;\ncvt.rn.f16x2.e4m3x2 %0, low;\ncvt.rn.f16x2.e4m3x2 %1, high; }"
      : "=r"(pairs[0]), "=r"(pairs[1])
      : "r"(x));
}

// a b + c on two 16-bit elements each.
__device__ inline unsigned fma_pair(unsigned a, unsigned b, unsigned c, Half) {
  unsigned d;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}
__device__ inline unsigned fma_pair(unsigned a, unsigned b, unsigned c, BFloat16) {
  unsigned d;
  asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
  return d;
}

// x, of which the compiler knows nothing: what follows from it is computed again, where keeping it would take registers from a loop.
__device__ inline unsigned opaque(unsigned x) {
  asm volatile("" : "+r"(x));
  return x;
}

// In a branch: keeps the compiler from computing both sides and choosing after.
__device__ inline void stay_branch() { asm volatile(""); }

// Scope: warp. x, which is the same in all lanes, as the compiler cannot know of what was read from memory: loops that end by it and
// addresses that follow from it then take uniform registers, which wgmma's descriptors need, and no instructions that bring lanes together.
__device__ inline int uniform(int x) { return __shfl_sync(0xffffffffu, x, 0); }

// 2^x by the special function unit; 2^-inf is 0.
__device__ inline float ex2(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// Scope: thread. Adds to global memory; the order of additions by several threads is not defined.
__device__ inline void red_add(float* global, float x) { asm volatile("red.global.add.f32 [%0], %1;" ::"l"(global), "f"(x) : "memory"); }
// sm_90: four at once, at a multiple of 16 bytes.
__device__ inline void red_add_4(float* global, const float (&x)[4]) {
  asm volatile("red.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global), "f"(x[0]), "f"(x[1]), "f"(x[2]), "f"(x[3]) : "memory");
}

// Scope: thread. Reads 16 bytes of global memory that nobody writes meanwhile, at a multiple of 16, past the L1. Volatile keeps several
// together, before what is computed of them.
__device__ inline void global_load_16(unsigned (&x)[4], const void* global) {
  asm volatile("ld.global.nc.L1::no_allocate.v4.b32 {%0, %1, %2, %3}, [%4];"
               : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
               : "l"(global));
}
// Scope: thread. Reads what other blocks have written, past the L1; four at a multiple of 16 bytes.
__device__ inline float global_load_l2(const float* global) {
  float x;
  asm volatile("ld.global.cg.f32 %0, [%1];" : "=f"(x) : "l"(global) : "memory");
  return x;
}
__device__ inline void global_load_l2_4(float (&x)[4], const float* global) {
  asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3]) : "l"(global) : "memory");
}
// Scope: thread. Adds 1 and returns what was there. What the block's threads have written before it, and the other blocks' before theirs,
// is there for those who meet it afterwards.
__device__ inline int count_up(int* global) {
  int before;
  asm volatile("atom.add.acq_rel.gpu.global.s32 %0, [%1], 1;" : "=r"(before) : "l"(global) : "memory");
  return before;
}
// Scope: thread. Writes 16 bytes to global memory, at a multiple of 16: four words assigned in a struct the compiler may write one by one.
__device__ inline void global_store_16(void* global, const unsigned (&x)[4]) {
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(global), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3]) : "memory");
}

// 1 / x to one unit in the last place, without the branch that a division takes for x near the ends of the range.
__device__ inline float rcp(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// --- sm_90a: barriers in shared memory, the tensor memory accelerator, warpgroup products ------------------------------------------------

// A barrier completes a phase when `count` threads have arrived and the bytes announced have come; waiters name the phase's parity.
__device__ inline void mbarrier_init(unsigned barrier, int count) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(count) : "memory");
}
// Scope: thread. Makes initialised barriers visible to the accelerator; a block barrier must follow.
__device__ inline void mbarrier_init_fence() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }
__device__ inline void mbarrier_arrive(unsigned barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
__device__ inline void mbarrier_arrive_expect(unsigned barrier, int bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}
__device__ inline void mbarrier_wait(unsigned barrier, unsigned parity) {
  unsigned done = 0;
  while (!done) {
    asm volatile("{ .reg .pred p; mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2; selp.u32 %0, 1, 0, p; }"
                 : "=r"(done)
                 : "r"(barrier), "r"(parity)
                 : "memory");
  }
}

// Scope: thread. Fetches a tensor map ahead of its first use.
__device__ inline void prefetch_map(const void* map) { asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory"); }

// Scope: one thread. Copies a box of a 4-D tensor map to shared memory; elements outside of the tensor become zeros and count as bytes.
__device__ inline void tma_load(unsigned smem, const void* map, unsigned barrier, int x, int y, int z, int w) {
  asm volatile(
      "cp.async.bulk.tensor.4d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%3, %4, %5, %6}], [%2];" ::"r"(smem),
      "l"(map), "r"(barrier), "r"(x), "r"(y), "r"(z), "r"(w)
      : "memory");
}
// From the tensor to the L2 alone.
__device__ inline void tma_prefetch(const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.prefetch.tensor.4d.L2.global [%0, {%1, %2, %3, %4}];" ::"l"(map), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

// Scope: thread. Adds floats in shared memory to global memory, later; `num_bytes` and both addresses are multiples of 16.
__device__ inline void bulk_add(float* global, unsigned shared, int num_bytes) {
  asm volatile("cp.reduce.async.bulk.global.shared::cta.bulk_group.add.f32 [%0], [%1], %2;" ::"l"(global), "r"(shared), "r"(num_bytes)
               : "memory");
}

// Scope: one thread. Copies a box from shared memory to a tensor, as far as the tensor goes, queued; then closes the batch of its copies,
// and waits until its batches have been read, or are there.
__device__ inline void tma_store(unsigned smem, const void* map, int x, int y, int z, int w) {
  asm volatile("cp.async.bulk.tensor.4d.global.shared::cta.bulk_group [%1, {%2, %3, %4, %5}], [%0];" ::"r"(smem), "l"(map), "r"(x), "r"(y),
               "r"(z), "r"(w)
               : "memory");
}
__device__ inline void bulk_commit() { asm volatile("cp.async.bulk.commit_group;" ::: "memory"); }
__device__ inline void bulk_wait_read() { asm volatile("cp.async.bulk.wait_group.read 0;" ::: "memory"); }
__device__ inline void bulk_wait() { asm volatile("cp.async.bulk.wait_group 0;" ::: "memory"); }

// Scope: thread. Orders its writes to shared memory before reads by the accelerator and by warpgroup products; a barrier must follow.
// Scope: cluster. What was written to shared memory before it is there for all blocks after it.
__device__ inline void cluster_sync() {
  asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Scope: thread. Reads the shared memory of a block of the cluster, where this block has `smem`; four at a multiple of 16 bytes.
__device__ inline unsigned smem_of_block(unsigned smem, int block) {
  unsigned address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(smem), "r"(block));
  return address;
}
__device__ inline float cluster_load(unsigned smem, int block) {
  float x;
  asm volatile("ld.shared::cluster.f32 %0, [%1];" : "=f"(x) : "r"(smem_of_block(smem, block)) : "memory");
  return x;
}
__device__ inline void cluster_load_4(float (&x)[4], unsigned smem, int block) {
  asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
               : "=f"(x[0]), "=f"(x[1]), "=f"(x[2]), "=f"(x[3])
               : "r"(smem_of_block(smem, block))
               : "memory");
}

__device__ inline void fence_async_proxy() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Scope: warpgroup. Before a batch of products whose registers other instructions have touched; closing a batch; waiting for all but the
// youngest kPending batches, after which their registers may be touched.
__device__ inline void wgmma_fence() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
__device__ inline void wgmma_commit() { asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory"); }
template <int kPending>
__device__ inline void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kPending) : "memory");
}

// Scope: warpgroup. Registers a thread, from the block's pool or back to it.
template <int kCount>
__device__ inline void registers_take() {
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
}
template <int kCount>
__device__ inline void registers_give() {
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
}

// Scope: `threads` threads that name the same barrier, 1 to 15 (0 is __syncthreads).
__device__ inline void named_barrier_sync(int barrier, int threads) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}
__device__ inline void named_barrier_arrive(int barrier, int threads) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace cupyflash

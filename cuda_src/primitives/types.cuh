// types.cuh: the element types, as bits, and their conversions to the type that a kernel computes in. No CUDA header is needed:
// the 16-bit types are structs of our own, so NVRTC compiles a kernel from this text alone.
#pragma once

namespace cupyflash {

struct Half {
  unsigned short bits;
};
struct BFloat16 {
  unsigned short bits;
};
struct E4M3 {  // sign, 4 bits of exponent with bias 7, 3 of mantissa; no infinity, and one NaN (arXiv 2209.05433, section 3)
  unsigned char bits;
};

__device__ inline float abs_of(float x) { return fabsf(x); }
__device__ inline double abs_of(double x) { return fabs(x); }
__device__ inline float nearest(float x) { return rintf(x); }  // integer, even in doubt
__device__ inline double nearest(double x) { return rint(x); }
__device__ inline float infinity(float) { return __int_as_float(0x7f800000); }
__device__ inline float not_a_number(float) { return __int_as_float(0x7fc00000); }
__device__ inline double infinity(double) { return __longlong_as_double(0x7ff0000000000000ll); }

// The type of sums and scores: float, double for double.
template <class Element>
struct AccumulatorOf {
  using Type = float;
};
template <>
struct AccumulatorOf<double> {
  using Type = double;
};

__device__ inline float widen(Half x) {
  float y;
  asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x.bits));
  return y;
}
__device__ inline float widen(BFloat16 x) { return __int_as_float(static_cast<int>(x.bits) << 16); }
__device__ inline float widen(float x) { return x; }
__device__ inline double widen(double x) { return x; }
__device__ inline float widen(signed char x) { return x; }

// As half precision, whose exponent has a bias of 15, it is 2^8 too small; that has subnormal numbers also where float32's are flushed to
// 0. The one NaN carries into the exponent of all ones.
__device__ inline float widen(E4M3 x) {
  const int code = x.bits & 0x7f;
  return widen(Half{static_cast<unsigned short>((x.bits & 0x80) << 8 | code << 7 | (code + 1 & 0x80) << 7)}) * 256.0f;
}

// Round to nearest even.
__device__ inline void narrow(float x, Half& y) { asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y.bits) : "f"(x)); }
__device__ inline void narrow(float x, BFloat16& y) {
  const unsigned bits = __float_as_int(x);
  const unsigned rounded = (bits + 0x7fff + ((bits >> 16) & 1)) >> 16;
  y.bits = x == x ? rounded : 0x7fc0;  // adding to the bits of a NaN could carry it into an infinity
}
__device__ inline void narrow(float x, float& y) { y = x; }
__device__ inline void narrow(float x, double& y) { y = x; }
__device__ inline void narrow(double x, double& y) { y = x; }
__device__ inline void narrow(double x, float& y) { y = static_cast<float>(x); }
__device__ inline void narrow(double x, Half& y) { narrow(static_cast<float>(x), y); }
__device__ inline void narrow(double x, BFloat16& y) { narrow(static_cast<float>(x), y); }

// Round to nearest even, and to the largest where a quantised cache has none so large. int8 has no NaN and stores 0.
template <class Wide>
__device__ inline void narrow(Wide x, signed char& y) {
  y = static_cast<signed char>(nearest(x != x ? Wide(0) : x < Wide(-128) ? Wide(-128) : x > Wide(127) ? Wide(127) : x));
}
template <class Wide>
__device__ inline void narrow(Wide x, E4M3& y) {
  const Wide size = abs_of(x) > Wide(448) ? Wide(448) : abs_of(x);
  const int exponent = max((__float_as_int(static_cast<float>(size)) >> 23) - 127, -6);  // one too many is no harm: the step is 16 or 8
  const float steps = __int_as_float((127 + 3 - exponent) << 23);                        // in a unit
  const int code = 8 * (exponent + 6) + static_cast<int>(nearest(x != x ? Wide(0) : size * Wide(steps)));
  const unsigned sign = __float_as_uint(static_cast<float>(x)) >> 31;
  y.bits = static_cast<unsigned char>(x != x ? 0x7f : sign << 7 | code);
}

__device__ inline int clamp(int x, int low, int high) { return max(low, min(x, high)); }

template <bool kValue>
struct Constant {
  static constexpr bool value = kValue;
};

template <bool kFirst, class A, class B>
struct Choice {
  using Type = A;
};
template <class A, class B>
struct Choice<false, A, B> {
  using Type = B;
};

template <class A, class B>
constexpr bool kSame = false;
template <class A>
constexpr bool kSame<A, A> = true;

}  // namespace cupyflash

// Floating point: exactly rounded operations in every rounding, conversions between all types, half and bfloat16.
// nvcc -ptx -arch=sm_90 floats.cu
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#define ID                                                                                                             \
    int i = blockIdx.x * blockDim.x + threadIdx.x;                                                                     \
    if (i >= n) return

#define EXACT(name, type, r, sqrt_, fma_, min_, max_, rint_, floor_, ceil_, trunc_, abs_, copysign_)                   \
    extern "C" __global__ void exact_##name(const type *a, const type *b, type *out, int n) {                          \
        ID;                                                                                                            \
        type x = a[i], y = b[i], *o = out + 16 * i;                                                                    \
        o[0] = x + y;                                                                                                  \
        o[1] = x - y;                                                                                                  \
        o[2] = x * y;                                                                                                  \
        o[3] = x / y;                                                                                                  \
        o[4] = sqrt_(abs_(x));                                                                                         \
        o[5] = fma_(x, y, x);                                                                                          \
        o[6] = min_(x, y);                                                                                             \
        o[7] = max_(x, y);                                                                                             \
        o[8] = rint_(x);                                                                                               \
        o[9] = floor_(x);                                                                                              \
        o[10] = ceil_(x);                                                                                              \
        o[11] = trunc_(x);                                                                                             \
        o[12] = copysign_(x, y);                                                                                       \
        o[13] = -x;                                                                                                    \
        o[14] = x < y ? (type)1 : (type)2;                                                                             \
        o[15] = x != x ? (type)1 : (type)2;                                                                            \
    }
EXACT(f32, float, f, sqrtf, fmaf, fminf, fmaxf, rintf, floorf, ceilf, truncf, fabsf, copysignf)
EXACT(f64, double, , sqrt, fma, fmin, fmax, rint, floor, ceil, trunc, fabs, copysign)

#define DIRECTED(name, type, r, p)                                                                                     \
    extern "C" __global__ void directed_##name##_##r(const type *a, const type *b, type *out, int n) {                 \
        ID;                                                                                                            \
        type x = a[i], y = b[i], *o = out + 5 * i;                                                                     \
        o[0] = __##p##add_##r(x, y);                                                                                   \
        o[1] = __##p##mul_##r(x, y);                                                                                   \
        o[2] = __##p##div_##r(x, y);                                                                                   \
        o[3] = __##p##sqrt_##r(x < 0 ? -x : x);                                                                        \
        o[4] = __##p##sub_##r(x, y);                                                                                   \
    }
DIRECTED(f32, float, rz, f)
DIRECTED(f32, float, ru, f)
DIRECTED(f32, float, rd, f)
DIRECTED(f64, double, rz, d)
DIRECTED(f64, double, ru, d)
DIRECTED(f64, double, rd, d)

// double -> everything -> double, and back
extern "C" __global__ void from_double(const double *a, long long *ints, double *reals, int n) {
    ID;
    double x = a[i];
    long long *o = ints + 16 * i;
    o[0] = (signed char)x;
    o[1] = (unsigned char)x;
    o[2] = (short)x;
    o[3] = (unsigned short)x;
    o[4] = (int)x;
    o[5] = (unsigned)x;
    o[6] = (long long)x;
    o[7] = (long long)(unsigned long long)x;
    o[8] = __double2int_rn(x);
    o[9] = __double2int_ru(x);
    o[10] = __double2int_rd(x);
    o[11] = __float2int_rn((float)x);
    o[12] = __float2uint_ru((float)x);
    o[13] = __float2ll_rd((float)x);
    o[14] = __double2ll_rn(x);
    o[15] = (long long)__double2ull_ru(x);
    double *r = reals + 4 * i;
    r[0] = (float)x;
    r[1] = __double2float_rz(x);
    r[2] = __double2float_ru(x);
    r[3] = __double2float_rd(x);
}

extern "C" __global__ void from_integers(const long long *a, double *out, int n) {
    ID;
    long long x = a[i];
    double *o = out + 12 * i;
    o[0] = (float)x;
    o[1] = (double)x;
    o[2] = (float)(unsigned long long)x;
    o[3] = (double)(unsigned long long)x;
    o[4] = (float)(int)x;
    o[5] = (float)(unsigned)x;
    o[6] = (double)(int)x;
    o[7] = (double)(unsigned)x;
    o[8] = __ll2float_rz(x);
    o[9] = __ll2float_ru(x);
    o[10] = __int2float_rd((int)x);
    o[11] = __ull2double_rz((unsigned long long)x);
}

extern "C" __global__ void halves(const __half *a, const __half *b, __half *out, int n) {
    ID;
    __half x = a[i], y = b[i], *o = out + 9 * i;
    o[0] = __hadd(x, y);
    o[1] = __hsub(x, y);
    o[2] = __hmul(x, y);
    o[3] = __hfma(x, y, x);
    o[4] = __hneg(x);
    o[5] = __habs(x);
    o[6] = __hmin(x, y);
    o[7] = __hlt(x, y) ? __float2half(1.0f) : __float2half(2.0f);
    __half2 two = __hmul2(__halves2half2(x, y), __halves2half2(y, y));
    o[8] = __hadd(__low2half(two), __high2half(two));
}

extern "C" __global__ void half_conversions(const float *a, const double *d, unsigned short *out, float *back, int n) {
    ID;
    unsigned short *o = out + 6 * i;
    o[0] = __half_as_ushort(__float2half_rn(a[i]));
    o[1] = __half_as_ushort(__double2half(d[i]));
    o[2] = __bfloat16_as_ushort(__float2bfloat16_rn(a[i]));
    o[3] = __bfloat16_as_ushort(__float2bfloat16_rz(a[i]));
    __half2 h = __floats2half2_rn(a[i], (float)d[i]);
    o[4] = __half_as_ushort(__low2half(h));
    o[5] = __half_as_ushort(__high2half(h));
    back[2 * i] = __half2float(__ushort_as_half(o[0]));
    back[2 * i + 1] = __bfloat162float(__ushort_as_bfloat16(o[2]));
}

extern "C" __global__ void brains(const __nv_bfloat16 *a, const __nv_bfloat16 *b, __nv_bfloat16 *out, int n) {
    ID;
    __nv_bfloat16 x = a[i], y = b[i], *o = out + 6 * i;
    o[0] = __hadd(x, y);
    o[1] = __hsub(x, y);
    o[2] = __hmul(x, y);
    o[3] = __hfma(x, y, x);
    o[4] = __hmax(x, y);
    o[5] = __hneg(x);
}

extern "C" __global__ void library(const float *a, float *out, int n) {
    ID;
    float x = a[i], *o = out + 12 * i;
    o[0] = sinf(x);
    o[1] = cosf(x);
    o[2] = expf(x);
    o[3] = logf(fabsf(x) + 1e-3f);
    o[4] = powf(fabsf(x), 1.7f);
    o[5] = tanhf(x);
    o[6] = atan2f(x, 2.0f);
    o[7] = rsqrtf(fabsf(x) + 1e-3f);
    o[8] = __expf(x);
    o[9] = erff(x);
    o[10] = cbrtf(x);
    o[11] = fmodf(x, 0.7f);
}

extern "C" __global__ void library64(const double *a, double *out, int n) {
    ID;
    double x = a[i], *o = out + 8 * i;
    o[0] = sin(x);
    o[1] = cos(x);
    o[2] = exp(x);
    o[3] = log(fabs(x) + 1e-3);
    o[4] = pow(fabs(x), 1.7);
    o[5] = tanh(x);
    o[6] = atan2(x, 2.0);
    o[7] = rsqrt(fabs(x) + 1e-3);
}

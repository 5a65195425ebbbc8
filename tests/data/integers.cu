// Integer arithmetic, bit operations and conversions; each kernel writes a row of results for every element.
// nvcc -ptx -arch=sm_90 integers.cu

template <typename T> __device__ void basic(T a, T b, T *out) {
    T d = b == 0 ? 1 : b;
    out[0] = a + b;
    out[1] = a - b;
    out[2] = a * b;
    out[3] = a / d;
    out[4] = a % d;
    out[5] = a & b;
    out[6] = a | b;
    out[7] = a ^ b;
    out[8] = ~a;
    out[9] = a << (b & (sizeof(T) * 8 - 1));
    out[10] = a >> (b & (sizeof(T) * 8 - 1));
    out[11] = a < b ? a : b;
    out[12] = a > b ? a : b;
    out[13] = -a;
    out[14] = (a < b) + 2 * (a <= b) + 4 * (a == b) + 8 * (a != b);
    out[15] = a * b + a;
}

#define BASIC(name, type)                                                                                              \
    extern "C" __global__ void basic_##name(const type *a, const type *b, type *out, int n) {                          \
        int i = blockIdx.x * blockDim.x + threadIdx.x;                                                                 \
        if (i < n) basic<type>(a[i], b[i], out + 16 * i);                                                              \
    }
BASIC(s8, signed char)
BASIC(u8, unsigned char)
BASIC(s16, short)
BASIC(u16, unsigned short)
BASIC(s32, int)
BASIC(u32, unsigned)
BASIC(s64, long long)
BASIC(u64, unsigned long long)

extern "C" __global__ void bits32(const unsigned *a, const unsigned *b, unsigned *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned x = a[i], y = b[i], *o = out + 20 * i;
    o[0] = __popc(x);
    o[1] = __clz(x);
    o[2] = __ffs(x);
    o[3] = __brev(x);
    o[4] = __byte_perm(x, y, 0x3175);
    o[5] = __byte_perm(x, y, y);
    o[6] = __funnelshift_l(x, y, y);
    o[7] = __funnelshift_r(x, y, x);
    o[8] = __funnelshift_lc(x, y, y & 63);
    o[9] = __funnelshift_rc(x, y, x & 63);
    o[10] = __umulhi(x, y);
    o[11] = __mulhi((int)x, (int)y);
    o[12] = __usad(x, y, 7);
    o[13] = __sad((int)x, (int)y, 7);
    o[14] = __dp4a((int)x, (int)y, 5);
    o[15] = __dp4a(x, y, 5u);
    o[16] = (x & y) | (~x & ~y);
    o[17] = __umul24(x, y);
    o[18] = __mul24((int)x, (int)y);
    o[19] = __uhadd(x, y);
}

extern "C" __global__ void bits64(const unsigned long long *a, const unsigned long long *b, unsigned long long *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned long long x = a[i], y = b[i], *o = out + 8 * i;
    o[0] = __popcll(x);
    o[1] = __clzll(x);
    o[2] = __ffsll(x);
    o[3] = __brevll(x);
    o[4] = __umul64hi(x, y);
    o[5] = (unsigned long long)__mul64hi((long long)x, (long long)y);
    unsigned __int128 wide = (unsigned __int128)x * y + x;
    o[6] = (unsigned long long)wide;
    o[7] = (unsigned long long)(wide >> 64);
}

// Extended precision by inline PTX, the carry chain, and bit fields.
extern "C" __global__ void carries(const unsigned *a, const unsigned *b, unsigned *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned a0 = a[2 * i], a1 = a[2 * i + 1], b0 = b[2 * i], b1 = b[2 * i + 1], *o = out + 12 * i;
    asm("add.cc.u32 %0, %3, %5; addc.cc.u32 %1, %4, %6; addc.u32 %2, 0, 0;"
        : "=&r"(o[0]), "=&r"(o[1]), "=&r"(o[2]) : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
    asm("sub.cc.u32 %0, %3, %5; subc.cc.u32 %1, %4, %6; subc.u32 %2, 0, 0;"
        : "=&r"(o[3]), "=&r"(o[4]), "=&r"(o[5]) : "r"(a0), "r"(a1), "r"(b0), "r"(b1));
    asm("mad.lo.cc.u32 %0, %2, %3, %4; madc.hi.u32 %1, %2, %3, %5;" : "=&r"(o[6]), "=&r"(o[7]) : "r"(a0), "r"(b0), "r"(a1), "r"(b1));
    asm("bfe.u32 %0, %1, %2, %3;" : "=r"(o[8]) : "r"(a0), "r"(b0 & 63), "r"(b1 & 63));
    asm("bfe.s32 %0, %1, %2, %3;" : "=r"(o[9]) : "r"(a0), "r"(b0 & 63), "r"(b1 & 63));
    asm("bfi.b32 %0, %1, %2, %3, %4;" : "=r"(o[10]) : "r"(a0), "r"(a1), "r"(b0 & 63), "r"(b1 & 63));
    asm("bfind.s32 %0, %1;" : "=r"(o[11]) : "r"(a0));
}

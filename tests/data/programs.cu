// Whole kernels as people write them: shared memory, warps, atomics, device functions, local arrays, tables, several CTAs.
// nvcc -ptx -arch=sm_90 programs.cu
#include <cooperative_groups.h>
#include <cooperative_groups/reduce.h>
namespace cg = cooperative_groups;

extern "C" __global__ void reduce_tree(const double *x, double *out, int n) {
    __shared__ double part[256];
    int t = threadIdx.x;
    double sum = 0;
    for (int i = blockIdx.x * blockDim.x + t; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    part[t] = sum;
    __syncthreads();
    for (int half = blockDim.x / 2; half; half >>= 1) {
        if (t < half) part[t] += part[t + half];
        __syncthreads();
    }
    if (t == 0) out[blockIdx.x] = part[0];
}

__device__ unsigned finished_blocks = 0;

// The last CTA to finish adds up what the others have left (fences and an atomic counter).
extern "C" __global__ void reduce_last(const int *x, long long *partial, long long *total, int n) {
    __shared__ bool last;
    long long sum = 0;
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) sum += x[i];
    for (int d = 16; d; d >>= 1) sum += __shfl_down_sync(~0u, sum, d);
    __shared__ long long warps[32];
    if (threadIdx.x % 32 == 0) warps[threadIdx.x / 32] = sum;
    __syncthreads();
    if (threadIdx.x == 0) {
        sum = 0;
        for (int w = 0; w < blockDim.x / 32; w++) sum += warps[w];
        partial[blockIdx.x] = sum;
        __threadfence();
        last = atomicInc(&finished_blocks, gridDim.x - 1) == gridDim.x - 1;
        if (last) {
            __threadfence();
            sum = 0;
            for (int b = 0; b < gridDim.x; b++) sum += ((volatile long long *)partial)[b];
            *total = sum;
        }
    }
}

extern "C" __global__ void scan_block(const int *x, int *out) {
    extern __shared__ int buffer[];
    int t = threadIdx.x, lane = t & 31, warp = t >> 5;
    int v = x[blockIdx.x * blockDim.x + t];
    for (int d = 1; d < 32; d <<= 1) {
        int other = __shfl_up_sync(~0u, v, d);
        if (lane >= d) v += other;
    }
    if (lane == 31) buffer[warp] = v;
    __syncthreads();
    if (warp == 0) {
        int w = lane < blockDim.x / 32 ? buffer[lane] : 0;
        for (int d = 1; d < 32; d <<= 1) {
            int other = __shfl_up_sync(~0u, w, d);
            if (lane >= d) w += other;
        }
        buffer[lane] = w;
    }
    __syncthreads();
    out[blockIdx.x * blockDim.x + t] = v + (warp ? buffer[warp - 1] : 0);
}

extern "C" __global__ void histogram(const unsigned char *x, unsigned *bins, int n) {
    __shared__ unsigned mine[256];
    for (int i = threadIdx.x; i < 256; i += blockDim.x) mine[i] = 0;
    __syncthreads();
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x) atomicAdd(&mine[x[i]], 1u);
    __syncthreads();
    for (int i = threadIdx.x; i < 256; i += blockDim.x) atomicAdd(&bins[i], mine[i]);
}

extern "C" __global__ void transpose(const float *in, float *out, int width, int height) {
    __shared__ float tile[16][17];
    int x = blockIdx.x * 16 + threadIdx.x, y = blockIdx.y * 16 + threadIdx.y;
    if (x < width && y < height) tile[threadIdx.y][threadIdx.x] = in[y * width + x];
    __syncthreads();
    x = blockIdx.y * 16 + threadIdx.x;
    y = blockIdx.x * 16 + threadIdx.y;
    if (x < height && y < width) out[y * height + x] = tile[threadIdx.x][threadIdx.y];
}

extern "C" __global__ void matmul(const float *a, const float *b, float *c, int n) {
    int row = blockIdx.y * blockDim.y + threadIdx.y, col = blockIdx.x * blockDim.x + threadIdx.x;
    if (row >= n || col >= n) return;
    float sum = 0;
    for (int k = 0; k < n; k++) sum = fmaf(a[row * n + k], b[k * n + col], sum);
    c[row * n + col] = sum;
}

struct Particle {
    double position[3];
    float mass;
    short kind;
};

__device__ __noinline__ Particle moved(Particle p, double dt, const double *velocity) {
    for (int d = 0; d < 3; d++) p.position[d] += dt * velocity[d];
    p.mass *= 0.5f;
    p.kind = -p.kind;
    return p;
}

__device__ __noinline__ double kinetic(const Particle &p, const double *velocity, double *square) {
    double v = 0;
    for (int d = 0; d < 3; d++) v += velocity[d] * velocity[d];
    *square = v;
    return 0.5 * p.mass * v;
}

// Structs by value and by reference, out parameters in local memory: the call ABI.
extern "C" __global__ void particles(const Particle *in, Particle *out, const double *velocities, double *energy, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    double square;
    Particle p = moved(in[i], 0.25, velocities + 3 * i);
    double e = kinetic(p, velocities + 3 * i, &square);
    out[i] = p;
    energy[i] = e + square;
}

// A local array with a dynamic index (insertion sort), and a device function that a barrier is in.
__device__ __noinline__ int through_shared(int v, int *buffer) {
    buffer[threadIdx.x] = v;
    __syncthreads();
    int r = buffer[blockDim.x - 1 - threadIdx.x];
    __syncthreads();
    return r;
}

extern "C" __global__ void sort_rows(const int *in, int *out, int columns) {
    __shared__ int buffer[128];
    int row[32];
    int t = threadIdx.x;
    for (int k = 0; k < columns; k++) {
        int v = in[t * columns + k], j = k;
        while (j > 0 && row[j - 1] > v) {
            row[j] = row[j - 1];
            j--;
        }
        row[j] = v;
    }
    for (int k = 0; k < columns; k++) out[t * columns + k] = through_shared(row[k], buffer);
}

__constant__ int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
__device__ int counters[4] = {10, 20, 30, 40};
__device__ int *second = &counters[1];

extern "C" __global__ void module_variables(int *out) {
    int t = threadIdx.x;
    out[t] = table[t & 7] + counters[t & 3];
    __syncthreads();
    if (t == 0) atomicAdd(second, 100);
}

extern "C" __global__ void automaton(const unsigned char *text, int *out, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    int state = 0, accumulated = 0;
    for (int k = 0; k < 64; k++) {
        switch (text[(i + k) % n] % 11) {
        case 0: state += 3; break;
        case 1: state ^= 0x55; break;
        case 2: state = state * 7 + 1; break;
        case 3: accumulated += state; break;
        case 4: state = -state; break;
        case 5: accumulated ^= state; break;
        case 6: state >>= 1; break;
        case 7: state |= 8; break;
        case 8: accumulated -= 5; break;
        default: state++;
        }
    }
    out[i] = state * 31 + accumulated;
}

extern "C" __global__ void groups(const int *x, int *out) {
    cg::thread_block block = cg::this_thread_block();
    auto tile = cg::tiled_partition<16>(block);
    int v = x[block.thread_rank()];
    int sum = cg::reduce(tile, v, cg::plus<int>());
    int largest = cg::reduce(tile, v, cg::greater<int>());
    int first = tile.shfl(v, 0);
    bool any = tile.any(v > 90);
    out[block.thread_rank()] = sum + 1000 * largest + (any ? 1000000 : 0) + (first << 24);
}

extern "C" __global__ void warp_tools(const int *x, unsigned *out) {
    int t = threadIdx.x;
    int v = x[t];
    unsigned *o = out + 8 * t;
    o[0] = __ballot_sync(~0u, v & 1);
    o[1] = __match_any_sync(~0u, v & 7);
    o[2] = __reduce_add_sync(~0u, (unsigned)v);
    o[3] = __reduce_max_sync(~0u, v);
    o[4] = __any_sync(~0u, v == 3) + 2 * __all_sync(~0u, v >= 0);
    o[5] = __shfl_xor_sync(~0u, v, 9);
    o[6] = __syncthreads_count(v & 1);
    o[7] = __reduce_xor_sync(~0u, (unsigned)v);
    if ((t & 31) < 12) o[5] += __shfl_sync(0xfff, v, t + 5, 4);
}

extern "C" __global__ void atomics(int *i32, unsigned *u32, unsigned long long *u64, float *f32, double *f64, int n) {
    int t = blockIdx.x * blockDim.x + threadIdx.x;
    if (t >= n) return;
    atomicAdd(i32, t);
    atomicSub(i32 + 1, t);
    atomicMin(i32 + 2, 100 - t);
    atomicMax(i32 + 3, t - 100);
    atomicAnd(i32 + 4, ~(1 << (t & 31)));
    atomicOr(i32 + 5, 1 << (t & 31));
    atomicXor(i32 + 6, t);
    atomicInc(u32, 6);
    atomicDec(u32 + 1, 6);
    atomicMin(u32 + 2, 1000000u - t);
    atomicAdd(u64, (unsigned long long)t << 32);
    atomicMax(u64 + 1, (unsigned long long)t << 40);
    atomicAdd(f32, 0.5f);
    atomicAdd(f64, 0.25 * t);
    // a lock-free maximum of doubles by compare-and-swap
    unsigned long long *p = (unsigned long long *)(f64 + 1), old = *p, seen;
    do {
        seen = old;
        if (__longlong_as_double(seen) >= t * 1.5) break;
        old = atomicCAS(p, seen, __double_as_longlong(t * 1.5));
    } while (old != seen);
    __shared__ int local;
    if (threadIdx.x == 0) local = 0;
    __syncthreads();
    atomicAdd(&local, 2);
    __syncthreads();
    if (threadIdx.x == 0) atomicExch(i32 + 8 + blockIdx.x, local);
}

// A ticket lock around a plain counter: spinning with acquire and release.
extern "C" __global__ void ticket_lock(unsigned *lock, int *counter) {
    unsigned ticket = atomicAdd(lock, 1u);
    while (*(volatile unsigned *)(lock + 1) != ticket) {
    }
    __threadfence();
    *counter = *counter + 1;
    __threadfence();
    atomicAdd(lock + 1, 1u);
}

extern "C" __global__ void vectors(const float4 *a, const uchar4 *b, const double2 *c, float4 *out, double2 *outd) {
    int i = threadIdx.x;
    float4 x = a[i];
    uchar4 y = b[i];
    double2 z = c[i];
    out[i] = make_float4(x.w + y.x, x.z + y.y, x.y + y.z, x.x + y.w);
    outd[i] = make_double2(z.y * 2, z.x * 3);
}

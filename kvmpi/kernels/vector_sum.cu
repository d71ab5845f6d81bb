// Sums of vectors. kvmpi/kernels/gpu.py has this compiled by NVRTC, one instance of the kernel per dtype.
//
// No header is included, cuda_fp16.h neither: half types are converted by integer arithmetic. NVRTC then finds what it
// needs whatever CUDA is installed, NaNs come out as kvmpi/kernels/host.py writes them, and the tests compile this very
// text for the host and compare every bit.

#ifdef __CUDACC__
// PTX, since CuPy compiles everything with -ftz=true, which flushes subnormals in a + b and in __fadd_rn(a, b).
// ".rn" also keeps additions and multiplications from being contracted.
__device__ inline float add(float a, float b)
{
    float result;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}

__device__ inline float multiply(float a, float b)
{
    float result;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
    return result;
}
#endif

__device__ inline double add(double a, double b) { return __dadd_rn(a, b); }
__device__ inline double multiply(double a, double b) { return __dmul_rn(a, b); }

template <class Integer> __device__ inline Integer add(Integer a, Integer b) { return (Integer)(a + b); }
template <class Integer> __device__ inline Integer multiply(Integer a, Integer) { return a; }  // are not scaled

// The dtypes: Item is what memory holds, Sum is what values are added up in.

template <class Number> struct Same
{
    typedef Number Item;
    typedef Number Sum;
    __device__ static Sum widen(Item item) { return item; }
    __device__ static Item narrow(Sum sum) { return sum; }
};

typedef Same<float> Float32;
typedef Same<double> Float64;
typedef Same<unsigned char> Uint8;
typedef Same<unsigned char> Int8;  // unsigned, where overflow is defined: it wraps around to the same bits
typedef Same<unsigned short> Int16;
typedef Same<unsigned int> Int32;
typedef Same<unsigned long long> Int64;

const unsigned int FLOAT32_INFINITY = 0x7F800000;

struct Bfloat16
{
    typedef unsigned short Item;
    typedef float Sum;

    __device__ static Sum widen(Item item) { return __uint_as_float((unsigned int)item << 16); }

    __device__ static Item narrow(Sum sum)
    {
        const unsigned int bits = __float_as_uint(sum);
        if ((bits & 0x7FFFFFFF) > FLOAT32_INFINITY)
            return 0x7FC0;
        // Half a unit of the last kept place, less one if that place is even; the carry may run up to infinity.
        return (Item)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);
    }
};

struct Float16
{
    typedef unsigned short Item;
    typedef float Sum;

    __device__ static Sum widen(Item item)
    {
        const unsigned int sign = (item & 0x8000u) << 16, size = item & 0x7FFFu;
        unsigned int bits = (size << 13) + 0x38000000;  // 112 is between the biases of the exponents
        if (size >= 0x7C00)
            bits = FLOAT32_INFINITY | size << 13;
        else if (size < 0x0400)  // a multiple of 2**-24, the last place of 0.5
            bits = __float_as_uint(add(__uint_as_float(0x3F000000 + size), -0.5f));
        return __uint_as_float(sign | bits);
    }

    __device__ static Item narrow(Sum sum)
    {
        const unsigned int sign = __float_as_uint(sum) >> 16 & 0x8000, size = __float_as_uint(sum) & 0x7FFFFFFF;
        if (size > FLOAT32_INFINITY)
            return 0x7E00;
        unsigned int bits = (size - 0x38000000 + 0x0FFF + (size >> 13 & 1)) >> 13;
        if (size >= 0x47800000)  // 65536; from 65520 on the carry above gives infinity
            bits = 0x7C00;
        else if (size < 0x38800000)  // 2**-14: adding 0.5 rounds to a multiple of 2**-24
            bits = __float_as_uint(add(__uint_as_float(size), 0.5f)) - 0x3F000000;
        return (Item)(sign | bits);
    }
};

// Items that are loaded or stored at once.

template <int BYTES> struct Word;
template <> struct Word<1> { typedef unsigned char Type; };
template <> struct Word<2> { typedef unsigned short Type; };
template <> struct Word<4> { typedef unsigned int Type; };
template <> struct Word<8> { typedef uint2 Type; };
template <> struct Word<16> { typedef uint4 Type; };

template <class Item, int LANES> union Pack
{
    typedef typename Word<LANES * sizeof(Item)>::Type Bits;
    Bits bits;
    Item items[LANES];

    __device__ void load(const void* vector, long long start) { bits = *(const Bits*)((const Item*)vector + start); }
    __device__ void store(void* vector, long long start) const { *(Bits*)((Item*)vector + start) = bits; }
};

const int MAX_DIRECT = 8;
const int GROUP = 4;  // vectors that are loaded before the first of them is added: an addition waits, a load does not

struct Sources
{
    const void* direct[MAX_DIRECT];
    const void* const* more;  // the vectors from MAX_DIRECT on
    int count;
};

// LANES elements of the sum, from element `start` on.
template <class In, class Out, int LANES>
__device__ inline void sum_pack(void* dst, const Sources& sources, typename In::Sum scale, long long start)
{
    Pack<typename In::Item, LANES> term[GROUP];
    typename In::Sum sum[LANES];
#pragma unroll
    for (int first = 0; first < MAX_DIRECT; first += GROUP)
    {
#pragma unroll
        for (int k = 0; k < GROUP; ++k)
            if (first + k < sources.count)
                term[k].load(sources.direct[first + k], start);
#pragma unroll
        for (int k = 0; k < GROUP; ++k)
            if (first + k < sources.count)
#pragma unroll
                for (int lane = 0; lane < LANES; ++lane)
                {
                    const typename In::Sum value = In::widen(term[k].items[lane]);
                    sum[lane] = first + k == 0 ? value : add(sum[lane], value);
                }
    }
#pragma unroll 1
    for (int k = MAX_DIRECT; k < sources.count; ++k)
    {
        term[0].load(sources.more[k - MAX_DIRECT], start);
#pragma unroll
        for (int lane = 0; lane < LANES; ++lane)
            sum[lane] = add(sum[lane], In::widen(term[0].items[lane]));
    }
    Pack<typename Out::Item, LANES> result;
#pragma unroll
    for (int lane = 0; lane < LANES; ++lane)
        result.items[lane] = Out::narrow(multiply(sum[lane], scale));
    result.store(dst, start);
}

// dst = (first source + second + ...) * scale over `length` elements, added from left to right. dst may be one of the
// sources. Out is In, or it is Float32 and In a half type: then the sum is not rounded.
//
// Elements from `head` on are summed in `packs` packs, of as many elements as are 16 bytes of the wider of In and Out,
// and there every vector is aligned to its pack. The elements before and behind are summed one by one.
template <class In, class Out>
__device__ inline void sum_vectors(
    void* dst, const Sources& sources, long long length, long long head, long long packs, typename In::Sum scale)
{
    const int LANES = 16 / (sizeof(typename In::Item) > sizeof(typename Out::Item) ? sizeof(typename In::Item)
                                                                                  : sizeof(typename Out::Item));
    const long long thread = (long long)blockIdx.x * blockDim.x + threadIdx.x;
    const long long threads = (long long)gridDim.x * blockDim.x;
    for (long long pack = thread; pack < packs; pack += threads)
        sum_pack<In, Out, LANES>(dst, sources, scale, head + pack * LANES);
    const long long packed = packs * LANES;
    for (long long i = thread; i < length - packed; i += threads)
        sum_pack<In, Out, 1>(dst, sources, scale, i < head ? i : i + packed);
}

// gpu.py adds one line with this macro, and names the kernel without C++ mangling: CuPy keeps the compiled code of such
// kernels on disk. 256 threads in 4 blocks on a multiprocessor (THREADS, BLOCKS_PER_SM there) have 64 registers each.
#define SUM_KERNEL(NAME, IN, OUT)                                                                                     \
    extern "C" __global__ void __launch_bounds__(256, 4) NAME(                                                        \
        void* dst, const void* s0, const void* s1, const void* s2, const void* s3, const void* s4, const void* s5,    \
        const void* s6, const void* s7, const void* const* more, int count, long long length, long long head,         \
        long long packs, IN::Sum scale)                                                                               \
    {                                                                                                                 \
        const Sources sources = {{s0, s1, s2, s3, s4, s5, s6, s7}, more, count};                                      \
        sum_vectors<IN, OUT>(dst, sources, length, head, packs, scale);                                               \
    }

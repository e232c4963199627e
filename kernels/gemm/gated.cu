// The gated GEMM of an MLP on Hopper: y = act(x @ gate.T) * (x @ up.T).
//
// weight [2 * size, depth] has the rows of `gate`, then those of `up`; x is [rows, depth], y is
// [rows, size]. A block computes 64 rows and TILE outputs in each of two warpgroups. Two blocks, a
// cluster, share what both read; the tensor memory accelerator copies it to the shared memory of both
// (multicast), half of it for each block's request:
//
//     SPLIT_ROWS    the blocks compute the same outputs of different rows, and share weights: a weight
//                   leaves the L2 cache once for 256 rows
//     otherwise     the blocks compute different outputs of the same rows, at most 128, and share x
//
// One more warpgroup, the producer, issues the copies, up to STAGES ahead, also those of the next
// tile while this tile's activation is computed. A cluster takes one tile after the other (a
// persistent kernel). The producer reads weights before the previous kernel has ended (programmatic
// dependent launch).
//
// kernels/gemm/gated.py defines TILE, STAGES, SPLIT_ROWS and BAND, `logit_of` (the activation is
// gate * logistic(logit_of(gate))), `rounded` (two floats to two 16-bit numbers), `low_of` and
// `high_of` (such numbers to floats), and `multiply_add`, whose number of registers depends on TILE.

constexpr int GROUPS = 2;                // computing warpgroups
constexpr int REGISTERS = 232;           // of a computing thread
constexpr int PRODUCER_REGISTERS = 40;   // of a thread of the producer
constexpr int ROWS = 64 * GROUPS;        // rows of a block
constexpr int BOX = 32;                  // rows of x that are copied at once
constexpr int DEPTH = 64;                // elements of a row in a stage: 128 bytes, swizzled
constexpr int BOX_BYTES = BOX * 128;
constexpr int X_BYTES = ROWS * 128;
constexpr int HALF_BYTES = TILE * 128;   // of `gate`, or of `up`
constexpr int STAGE_BYTES = X_BYTES + 2 * HALF_BYTES;

struct alignas(64) TensorMap { unsigned long long words[16]; };

__device__ inline unsigned address(const void* shared) {
    return static_cast<unsigned>(__cvta_generic_to_shared(shared));
}

__device__ inline void wait(unsigned barrier, unsigned phase) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@!done bra again;\n"
        "}" :: "r"(barrier), "r"(phase) : "memory");
}

__device__ inline void expect(unsigned barrier, unsigned bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;"
                 :: "r"(barrier), "r"(bytes) : "memory");
}

// Arrive at the barrier of the cluster's block `rank`. The barrier orders reads of shared memory by
// wgmma, which are over, so that no fence of the whole cluster is needed (it would take 0.5 us).
__device__ inline void arrive(unsigned barrier, unsigned rank) {
    asm volatile(
        "{\n"
        ".reg .b32 there;\n"
        "mapa.shared::cluster.u32 there, %0, %1;\n"
        "mbarrier.arrive.shared::cluster.b64 _, [there];\n"
        "}" :: "r"(barrier), "r"(rank) : "memory");
}

__device__ inline void copy(unsigned to, const TensorMap* map, int column, int row, unsigned full) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];"
        :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(full) : "memory");
}

__device__ inline void copy_to_both(
    unsigned to, const TensorMap* map, int column, int row, unsigned full) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes"
        ".multicast::cluster [%0], [%1, {%2, %3}], [%4], %5;"
        :: "r"(to), "l"(map), "r"(column), "r"(row), "r"(full), "h"((unsigned short)3) : "memory");
}

// wgmma's description of a tile in shared memory; eight rows of 128 bytes are 1,024 bytes.
__device__ inline unsigned long long tile_at(unsigned shared) {
    return (1ull << 62) | (64ull << 32) | (1ull << 16) | ((shared & 0x3FFFF) >> 4);
}

__device__ inline float activated(float gate) {
    return __fdividef(gate, 1.0f + __expf(-logit_of(gate)));
}

// act(gate) * up of two outputs, whose sums are rounded first, as two GEMMs would round them.
__device__ inline unsigned gated(const float* gate, const float* up) {
    const unsigned g = rounded(gate[0], gate[1]), u = rounded(up[0], up[1]);
    return rounded(activated(low_of(g)) * low_of(u), activated(high_of(g)) * high_of(u));
}

// Transpose a 4 x 4 matrix of which each of four neighbouring lanes has a row.
__device__ inline void transpose(unsigned (&row)[4], int lane) {
    const bool odd = lane & 1, upper = lane & 2;
    const unsigned a = __shfl_xor_sync(~0u, odd ? row[0] : row[1], 1);
    const unsigned b = __shfl_xor_sync(~0u, odd ? row[2] : row[3], 1);
    if (odd) { row[0] = a; row[2] = b; } else { row[1] = a; row[3] = b; }
    const unsigned c = __shfl_xor_sync(~0u, upper ? row[0] : row[2], 2);
    const unsigned d = __shfl_xor_sync(~0u, upper ? row[1] : row[3], 2);
    if (upper) { row[0] = c; row[1] = d; } else { row[2] = c; row[3] = d; }
}

struct Shape { int rows, size, steps, row_blocks, column_blocks; };  // blocks: of a cluster

struct Place { int row, column; };  // of a tile

// The first row and output of a block's part of a cluster's tile. BAND blocks of rows share a tile's
// weights before the next tile of columns.
__device__ inline Place place_of(int tile, const Shape& shape, int rank) {
    const int first = tile / (BAND * shape.column_blocks) * BAND;
    const int within = tile % (BAND * shape.column_blocks);
    const int height = min(BAND, shape.row_blocks - first);
    const int row = first + within % height, column = within / height;
    if (SPLIT_ROWS) return {(2 * row + rank) * ROWS, column * TILE};
    return {row * ROWS, (2 * column + rank) * TILE};
}

__device__ inline void produce(
    const TensorMap* x, const TensorMap* weight, unsigned start, unsigned full, unsigned empty,
    int rank, const Shape& shape) {
    const int tiles = shape.row_blocks * shape.column_blocks;
    const int begun = min(shape.steps, STAGES);  // stages whose weights are read before x is ready
    int stage = 0;
    unsigned phase = 1;
    for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        const Place place = place_of(tile, shape, rank);
        const int boxes = max(0, min(ROWS / BOX, (shape.rows - place.row + BOX - 1) / BOX));
        const bool any = place.column < shape.size;
        const auto expect_stage = [&](unsigned ready) {
            expect(ready, boxes * BOX_BYTES + (any ? 2 * HALF_BYTES : 0));
        };
        const auto copy_weights = [&](unsigned to, int step, unsigned ready) {
            to += X_BYTES;
            if (SPLIT_ROWS) {
                copy_to_both(to + rank * HALF_BYTES, weight, step * DEPTH,
                             place.column + rank * shape.size, ready);
            } else if (any) {
                copy(to, weight, step * DEPTH, place.column, ready);
                copy(to + HALF_BYTES, weight, step * DEPTH, place.column + shape.size, ready);
            }
        };
        const bool first = tile == blockIdx.x / 2;
        if (first) {
            for (int step = 0; step < begun; step++) {
                expect_stage(full + step * 8);
                copy_weights(start + step * STAGE_BYTES, step, full + step * 8);
            }
            asm volatile("griddepcontrol.wait;" ::: "memory");
        }
        for (int step = 0; step < shape.steps; step++) {
            const unsigned ready = full + stage * 8, to = start + stage * STAGE_BYTES;
            if (!first || step >= begun) {
                wait(empty + stage * 8, phase);
                expect_stage(ready);
                copy_weights(to, step, ready);
            }
            for (int box = SPLIT_ROWS ? 0 : rank; box < boxes; box += SPLIT_ROWS ? 1 : 2)
                (SPLIT_ROWS ? copy : copy_to_both)(
                    to + box * BOX_BYTES, x, step * DEPTH, place.row + box * BOX, ready);
            if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
    }
}

__device__ inline void compute(
    unsigned short* y, unsigned start, unsigned full, unsigned empty, int group, int rank,
    const Shape& shape) {
    const int tiles = shape.row_blocks * shape.column_blocks;
    const int thread = threadIdx.x % 128, lane = thread % 32;
    int stage = 0;
    unsigned phase = 0;
    float sums[TILE];  // of `gate`, then of `up`: TILE / 2 each
    for (int tile = blockIdx.x / 2; tile < tiles; tile += gridDim.x / 2) {
        Place place = place_of(tile, shape, rank);
        place.row += group * 64;
        const bool any = place.row < shape.rows && place.column < shape.size;
        for (int step = 0; step < shape.steps; step++) {
            wait(full + stage * 8, phase);
            if (any) {
                const unsigned from = start + stage * STAGE_BYTES;
                const unsigned long long a = tile_at(from + group * 64 * 128);
                const unsigned long long b = tile_at(from + X_BYTES);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int part = 0; part < DEPTH / 16; part++)  // 16 elements are 32 bytes
                    multiply_add(sums, a + 2 * part, b + 2 * part, step + part > 0);
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            }
            // The stage before is no longer read; a tile's first step has none.
            if (step > 0 && thread < 2) arrive(empty + (stage ? stage - 1 : STAGES - 1) * 8, thread);
            if (++stage == STAGES) { stage = 0; phase ^= 1; }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
        if (thread < 2) arrive(empty + (stage ? stage - 1 : STAGES - 1) * 8, thread);
        if (!any) continue;
#pragma unroll
        for (int half = 0; half < 2; half++) {  // eight rows
            const int row = place.row + thread / 32 * 16 + half * 8 + lane / 4;
            unsigned short* out = y + (long long)row * shape.size;
#pragma unroll
            for (int j = 0; j < TILE / 8; j += 4) {  // four blocks of eight outputs
                unsigned pairs[4] = {};
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float* gate = sums + 4 * (j + i) + 2 * half;
                    if (j + i < TILE / 8) pairs[i] = gated(gate, gate + TILE / 2);
                }
                transpose(pairs, lane);
                const int block = j + lane % 4, column = place.column + block * 8;
                if (block < TILE / 8 && row < shape.rows && column < shape.size)
                    *reinterpret_cast<uint4*>(out + column) =
                        make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
            }
        }
    }
}

extern "C" __global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(128 * GROUPS + 128, 1)
gated_gemm(
    const __grid_constant__ TensorMap x, const __grid_constant__ TensorMap weight,
    unsigned short* y, const __grid_constant__ Shape shape) {
    extern __shared__ unsigned char memory[];
    __shared__ alignas(8) unsigned long long full[STAGES], empty[STAGES];
    const unsigned start = (address(memory) + 1023) & ~1023u;
    unsigned rank;
    asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
    const int group = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < STAGES; stage++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(address(full + stage)));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;"
                         :: "r"(address(empty + stage)), "r"(2 * GROUPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
    if (group == GROUPS) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" :: "n"(PRODUCER_REGISTERS));
        if (threadIdx.x == 128 * GROUPS)
            produce(&x, &weight, start, address(full), address(empty), rank, shape);
        __syncwarp();
        asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
        compute(y, start, address(full), address(empty), group, rank, shape);
    }
    // A block must not end while the other one copies to its memory.
    asm volatile("barrier.cluster.arrive.release.aligned;\n"
                 "barrier.cluster.wait.acquire.aligned;" ::: "memory");
}

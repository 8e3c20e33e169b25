/* File pages and their digests, read by the computing threads. Compiled by build.py.
 *
 * A page in the OS page cache costs a copy, so reading it is work for every core; but separate threads would compete
 * with OpenMP's, which spin for their next task, and then a product waits for a thread that has lost its core. So
 * OpenMP's own threads read. Each segment's XXH3-64 (the long form, with seed 0 and the standard secret,
 * github.com/Cyan4973/xxHash/blob/dev/doc/xxhash_spec.md) is computed while the segment is in cache.
 */
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <unistd.h>

#define P32_1 0x9E3779B1u
#define P32_2 0x85EBCA77u
#define P32_3 0xC2B2AE3Du
#define P64_1 0x9E3779B185EBCA87u
#define P64_2 0xC2B2AE3D27D4EB4Fu
#define P64_3 0x165667B19E3779F9u
#define P64_4 0x85EBCA77C2B2AE63u
#define P64_5 0x27D4EB2F165667C5u

#define LANES 8
#define STRIPE 64           /* bytes per step, a word per lane */
#define STRIPES 16          /* per block */
#define SHORT 240           /* up to here XXH3 is defined differently */
#define ENDED (-1)

static const uint8_t secret[192] = {
    0xb8, 0xfe, 0x6c, 0x39, 0x23, 0xa4, 0x4b, 0xbe, 0x7c, 0x01, 0x81, 0x2c, 0xf7, 0x21, 0xad, 0x1c,
    0xde, 0xd4, 0x6d, 0xe9, 0x83, 0x90, 0x97, 0xdb, 0x72, 0x40, 0xa4, 0xa4, 0xb7, 0xb3, 0x67, 0x1f,
    0xcb, 0x79, 0xe6, 0x4e, 0xcc, 0xc0, 0xe5, 0x78, 0x82, 0x5a, 0xd0, 0x7d, 0xcc, 0xff, 0x72, 0x21,
    0xb8, 0x08, 0x46, 0x74, 0xf7, 0x43, 0x24, 0x8e, 0xe0, 0x35, 0x90, 0xe6, 0x81, 0x3a, 0x26, 0x4c,
    0x3c, 0x28, 0x52, 0xbb, 0x91, 0xc3, 0x00, 0xcb, 0x88, 0xd0, 0x65, 0x8b, 0x1b, 0x53, 0x2e, 0xa3,
    0x71, 0x64, 0x48, 0x97, 0xa2, 0x0d, 0xf9, 0x4e, 0x38, 0x19, 0xef, 0x46, 0xa9, 0xde, 0xac, 0xd8,
    0xa8, 0xfa, 0x76, 0x3f, 0xe3, 0x9c, 0x34, 0x3f, 0xf9, 0xdc, 0xbb, 0xc7, 0xc7, 0x0b, 0x4f, 0x1d,
    0x8a, 0x51, 0xe0, 0x4b, 0xcd, 0xb4, 0x59, 0x31, 0xc8, 0x9f, 0x7e, 0xc9, 0xd9, 0x78, 0x73, 0x64,
    0xea, 0xc5, 0xac, 0x83, 0x34, 0xd3, 0xeb, 0xc3, 0xc5, 0x81, 0xa0, 0xff, 0xfa, 0x13, 0x63, 0xeb,
    0x17, 0x0d, 0xdd, 0x51, 0xb7, 0xf0, 0xda, 0x49, 0xd3, 0x16, 0x55, 0x26, 0x29, 0xd4, 0x68, 0x9e,
    0x2b, 0x16, 0xbe, 0x58, 0x7d, 0x47, 0xa1, 0xfc, 0x8f, 0xf8, 0xb8, 0xd1, 0x7a, 0xd0, 0x31, 0xce,
    0x45, 0xcb, 0x3a, 0x8f, 0x95, 0x16, 0x04, 0x28, 0xaf, 0xd7, 0xfb, 0xca, 0xbb, 0x4b, 0x40, 0x7e,
};

static inline uint64_t word(const uint8_t *at) {
    uint64_t value;
    memcpy(&value, at, sizeof value);
    return value;
}

static inline void take(uint64_t sums[LANES], const uint8_t *stripe, const uint8_t *key) {
    uint64_t words[LANES], keys[LANES];
    memcpy(words, stripe, STRIPE);
    memcpy(keys, key, STRIPE);
    for (int i = 0; i < LANES; i++) keys[i] ^= words[i];
    for (int i = 0; i < LANES; i++) sums[i] += words[i ^ 1] + (keys[i] & 0xFFFFFFFFu) * (keys[i] >> 32);
}

static inline uint64_t folded(uint64_t a, uint64_t b) {
    const unsigned __int128 product = (unsigned __int128)a * b;
    return (uint64_t)product ^ (uint64_t)(product >> 64);
}

/* for more than SHORT bytes */
static uint64_t xxh3(const uint8_t *data, int64_t nbytes) {
    uint64_t sums[LANES] = {P32_3, P64_1, P64_2, P64_3, P64_4, P32_2, P64_5, P32_1};
    const uint8_t *const last = secret + sizeof secret - STRIPE;
    const int64_t stripes = (nbytes - 1) / STRIPE;
    for (int64_t stripe = 0; stripe < stripes; stripe += STRIPES) {
        const int64_t count = stripes - stripe < STRIPES ? stripes - stripe : STRIPES;
        for (int64_t i = 0; i < count; i++) take(sums, data + (stripe + i) * STRIPE, secret + 8 * i);
        if (count == STRIPES)
            for (int i = 0; i < LANES; i++) sums[i] = (sums[i] ^ sums[i] >> 47 ^ word(last + 8 * i)) * P32_1;
    }
    take(sums, data + nbytes - STRIPE, last - 7);
    uint64_t hash = (uint64_t)nbytes * P64_1;
    for (int i = 0; i < LANES; i += 2)
        hash += folded(sums[i] ^ word(secret + 11 + 8 * i), sums[i + 1] ^ word(secret + 19 + 8 * i));
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9u;
    return hash ^ hash >> 32;
}

static int filled(int fd, uint8_t *out, int64_t nbytes, int64_t offset) {
    while (nbytes > 0) {
        const ssize_t got = pread(fd, out, (size_t)nbytes, (off_t)offset);
        if (got < 0 && errno == EINTR) continue;
        if (got < 0) return errno;
        if (got == 0) return ENDED;
        out += got, offset += got, nbytes -= got;
    }
    return 0;
}

/* Fill out [nbytes] from a file offset, and digests [segments][8] in xxhash's big-endian form. Every segment has more
 * than SHORT bytes. Returns 0, an errno, or ENDED if the file is too short. */
int vbrt_read(int fd, uint8_t *out, int64_t nbytes, int64_t offset, int64_t segment, uint8_t *digests, int threads) {
    const int64_t segments = (nbytes + segment - 1) / segment;
    int failed = 0;
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads)
    for (int64_t i = 0; i < segments; i++) {
        const int64_t at = i * segment, count = nbytes - at < segment ? nbytes - at : segment;
        const int code = filled(fd, out + at, count, offset + at);
        if (code) {
            __atomic_store_n(&failed, code, __ATOMIC_RELAXED);
            continue;
        }
        const uint64_t hash = __builtin_bswap64(xxh3(out + at, count));
        memcpy(digests + 8 * i, &hash, sizeof hash);
    }
    return failed;
}

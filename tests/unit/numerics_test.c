// SPDX-License-Identifier: Apache-2.0
// The named arithmetic against definitions written another way: rsqrt, BF16, mma16 (SPEC 3.2, 3.3).
#include <setjmp.h>
#include <stdbool.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include <cmocka.h>

#include "numerics.h"

static uint64_t state = 20240607;

static uint64_t rnd(void) {
    state += 0x9E3779B97F4A7C15u;
    uint64_t z = state;
    z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
    z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
    return z ^ (z >> 31);
}

// ---- rsqrt -----------------------------------------------------------------------------------
static uint32_t square_by_definition(uint32_t x) {
    uint64_t sum = 0;
    for (int i = 0; i < 17; i++)
        for (int j = i; j < 17; j++) {
            int column = i == j ? 2 * i : i + j + 1;
            if ((x >> i & 1) && (x >> j & 1) && column >= 19) sum += UINT64_C(1) << (column - 19);
        }
    return (uint32_t)sum;
}

static void rsqrt_square_all(void **unused) {
    (void)unused;
    for (uint32_t x = 0; x < 1u << 17; x++)
        if (ctxkv__rsqrt_square(x) != square_by_definition(x))
            fail_msg("x = %u: %u", x, ctxkv__rsqrt_square(x));
}

// FNV-1a-64 of the 2^24 results for 0x3F800000 .. 0x407FFFFF.
static uint64_t checksum(float (*f)(float)) {
    uint64_t hash = 1469598103934665603u;
    for (uint32_t b = 0x3F800000; b < 0x40800000; b++) {
        uint32_t r = ctxkv__bits(f(ctxkv__float(b)));
        for (int byte = 0; byte < 4; byte++)
            hash = (hash ^ (r >> (8 * byte) & 255)) * 1099511628211u;
    }
    return hash;
}

static void rsqrt_checksum(void **unused) {
    (void)unused;
    assert_true(checksum(ctxkv__rsqrt) == 0xe97cb9514f40c1a6u);
    assert_true(checksum(ctxkv__rsqrt_ftz) == 0xe97cb9514f40c1a6u);
}

static void rsqrt_specials(void **unused) {
    (void)unused;
    static const uint32_t both[][2] = {
        {0x7FC00000, 0x7FFFFFFF}, {0x7F800001, 0x7FFFFFFF}, {0xFFC12345, 0x7FFFFFFF},
        {0xBF800000, 0x7FFFFFFF}, {0x80800000, 0x7FFFFFFF}, {0xFF800000, 0x7FFFFFFF},
        {0x7F800000, 0x00000000}, {0x00000000, 0x7F800000}, {0x80000000, 0xFF800000},
        {0x3F800000, 0x3F800000}, {0x40800000, 0x3F000000}, {0x00800000, 0x5F000000}};
    for (size_t i = 0; i < sizeof both / sizeof *both; i++) {
        assert_int_equal(ctxkv__bits(ctxkv__rsqrt(ctxkv__float(both[i][0]))), both[i][1]);
        assert_int_equal(ctxkv__bits(ctxkv__rsqrt_ftz(ctxkv__float(both[i][0]))), both[i][1]);
    }
    assert_int_equal(ctxkv__bits(ctxkv__rsqrt_ftz(ctxkv__float(0x007FFFFF))), 0x7F800000);
    assert_int_equal(ctxkv__bits(ctxkv__rsqrt_ftz(ctxkv__float(0x80000001))), 0xFF800000);
    assert_int_equal(ctxkv__bits(ctxkv__rsqrt(ctxkv__float(0x80000001))), 0x7FFFFFFF);
    // 2^-149 is 2 * 4^-75, 2^-148 is 4^-74: the latter exact, the former as for 2.
    assert_int_equal(ctxkv__bits(ctxkv__rsqrt(ctxkv__float(0x00000002))), (127 + 74) << 23);
    uint32_t of_two = ctxkv__bits(ctxkv__rsqrt(2.0f));
    assert_int_equal(ctxkv__bits(ctxkv__rsqrt(ctxkv__float(1))), of_two + (75u << 23));
}

// A factor of 4 in the input is a factor of 2 in the output, subnormals included.
static void rsqrt_scales(void **unused) {
    (void)unused;
    for (int n = 0; n < 200000; n++) {
        uint32_t r = (uint32_t)rnd(), field = 1 + (uint32_t)(rnd() % 252);
        uint32_t b = field << 23 | (r & 0x7FFFFF);
        uint32_t small = ctxkv__bits(ctxkv__rsqrt(ctxkv__float(b)));
        uint32_t large = ctxkv__bits(ctxkv__rsqrt(ctxkv__float(b + (2u << 23))));
        assert_int_equal(small, large + (1u << 23));
        uint32_t m = 1 + (r & 0x1FFFFF); // a subnormal whose fourfold is exact
        float fourfold = ctxkv__float(m) * 4.0f;
        assert_int_equal(
            ctxkv__bits(ctxkv__rsqrt(ctxkv__float(m))),
            ctxkv__bits(ctxkv__rsqrt(fourfold)) + (1u << 23));
    }
}

// ---- BF16 ------------------------------------------------------------------------------------
static void bf16_rounding(void **unused) {
    (void)unused;
    for (uint32_t h = 0; h < 1u << 16; h++) {
        float x = ctxkv__from_bf16((uint16_t)h);
        bool nan = (h & 0x7FFF) > 0x7F80;
        assert_int_equal(ctxkv__to_bf16(x), nan ? 0x7FFF : h);
        if ((h & 0x7F80) == 0x7F80) continue;
        // Halfway goes to the even neighbour, a bit to either side to the nearer one.
        uint32_t half = h << 16 | 0x8000;
        assert_int_equal(ctxkv__to_bf16(ctxkv__float(half)), h + (h & 1));
        assert_int_equal(ctxkv__to_bf16(ctxkv__float(half - 1)), h);
        assert_int_equal(ctxkv__to_bf16(ctxkv__float(half + 1)), h + 1);
    }
    assert_int_equal(ctxkv__to_bf16(ctxkv__float(0x7F800001)), 0x7FFF);
    assert_int_equal(ctxkv__to_bf16(ctxkv__float(0xFFFFFFFF)), 0x7FFF);
}

// ---- mma16: every term as a fraction of 2^-266 in a fixed-point number of 640 bits -----------
// bit 0 of a number is worth 2^-320; a product's lowest bit is 2^(-126 - 126 - 14) = 2^-266.
#define LOW (-320)
#define WORDS 20

struct fixed {
    uint32_t w[WORDS];
};

static struct fixed fixed_of(uint64_t significand, int exponent) {
    struct fixed f = {{0}};
    int at = exponent - LOW;
    for (int i = 0; i < 64; i++)
        if (significand >> i & 1) f.w[(at + i) / 32] |= 1u << (at + i) % 32;
    return f;
}

static int top_bit(const struct fixed *f) {
    for (int i = 32 * WORDS - 1; i >= 0; i--)
        if (f->w[i / 32] >> i % 32 & 1) return i;
    return -1;
}

static void cut_below(struct fixed *f, int bit) {
    for (int i = 0; i < bit && i < 32 * WORDS; i++) f->w[i / 32] &= ~(1u << i % 32);
}

static void add(struct fixed *f, const struct fixed *g, bool subtract) {
    uint64_t carry = subtract;
    for (int i = 0; i < WORDS; i++) {
        carry += (uint64_t)f->w[i] + (subtract ? ~g->w[i] : g->w[i]);
        f->w[i] = (uint32_t)carry;
        carry >>= 32;
    }
}

static uint32_t fixed_to_float(struct fixed f) {
    struct fixed zero = {{0}};
    bool negative = f.w[WORDS - 1] >> 31;
    if (negative) {
        add(&zero, &f, true);
        f = zero;
    }
    int top = top_bit(&f);
    if (top < 0) return 0;
    int exponent = top + LOW;
    uint32_t sign = negative ? 0x80000000u : 0;
    if (exponent > 127) return sign | 0x7F800000u;
    int lowest = exponent < -126 ? -149 - LOW : top - 23; // the result's last bit
    uint32_t significand = 0;
    for (int i = 23; i >= 0; i--)
        significand = significand << 1 | (f.w[(lowest + i) / 32] >> (lowest + i) % 32 & 1);
    if (exponent < -126) return significand ? sign | significand : 0; // zero loses its sign
    return sign | (uint32_t)(exponent + 127) << 23 | (significand & 0x7FFFFF);
}

struct number { // of BF16 or FP32 bits, by the C library's floating point
    double value;
    int exponent; // of significand bit 1.0, -126 for subnormals
};

static struct number number_of(uint32_t bits) {
    int field = (int)(bits >> 23 & 255);
    return (struct number){(double)ctxkv__float(bits), field ? field - 127 : -126};
}

static uint64_t significand_of(double value, int exponent, int fraction) {
    double magnitude = value < 0 ? -value : value;
    for (int e = exponent; e < 0; e++) magnitude *= 2;
    for (int e = exponent; e > 0; e--) magnitude /= 2;
    return (uint64_t)(magnitude * (double)(UINT64_C(1) << fraction));
}

static bool is_nan(double x) {
    return x != x;
}

static uint32_t mma16_by_definition(const uint16_t *a, const uint16_t *b, float acc) {
    struct fixed terms[17], sum = {{0}};
    bool negative[17];
    int count = 0, emax = -100000;
    double specials = 0; // IEEE arithmetic knows the rules of infinities and NaN
    for (int i = 0; i <= 16; i++) {
        struct number x = number_of(i < 16 ? (uint32_t)a[i] << 16 : ctxkv__bits(acc));
        struct number y = number_of(i < 16 ? (uint32_t)b[i] << 16 : 0x3F800000);
        double product = x.value * y.value; // exact in FP64
        if (is_nan(product) || product - product != 0) {
            specials += product;
            continue;
        }
        if (product == 0) continue;
        int exponent = x.exponent + y.exponent, fraction = i < 16 ? 14 : 23;
        terms[count] = fixed_of(significand_of(product, exponent, fraction), exponent - fraction);
        negative[count++] = product < 0;
        if (exponent > emax) emax = exponent;
    }
    if (is_nan(specials)) return 0x7FFFFFFF;
    if (specials != 0) return specials > 0 ? 0x7F800000 : 0xFF800000;
    if (emax < -133) emax = -133;
    for (int i = 0; i < count; i++) {
        cut_below(&terms[i], emax - 25 - LOW);
        add(&sum, &terms[i], negative[i]);
    }
    return fixed_to_float(sum);
}

static void same(const uint16_t *a, const uint16_t *b, uint32_t acc) {
    uint32_t got = ctxkv__bits(ctxkv__mma16(a, b, ctxkv__float(acc)));
    uint32_t want = mma16_by_definition(a, b, ctxkv__float(acc));
    if (got == want) return;
    for (int i = 0; i < 16; i++) print_message("%04x*%04x ", a[i], b[i]);
    fail_msg("acc %08x: is %08x, must be %08x", acc, got, want);
}

enum { SPREAD, SMALL, LARGE, SPARSE, RAW, KINDS };

static uint16_t value(int kind, int spread) {
    uint64_t r = rnd();
    uint32_t low = r & 0x807F, pick = (uint32_t)(r >> 32);
    if (kind == RAW) return (uint16_t)r;
    if (kind == SPARSE && pick % 4) return (uint16_t)(r & 0x8000);
    int field = kind == SMALL   ? (int)(pick % 70)
                : kind == LARGE ? 190 + (int)(pick % 65)
                                : 127 + (int)pick % (spread + 1);
    return (uint16_t)(low | (uint32_t)field << 7);
}

// What an H200 gave, by wgmma and by mma.sync, where the terms cut far below 2^-149 decide.
static void mma16_far_down(void **unused) {
    (void)unused;
    static const struct {
        uint16_t a[16], b[16];
        uint32_t acc, result;
    } seen[] = {
        {{0x8000, 0x1C46, 0x1B59, 0x1A36, 0x9A7C, 0x0000, 0x1BDC, 0x1F46, 0x8000, 0x99DE, 0x9C31,
          0x1C9A, 0x1C3B, 0x9EEA, 0x1F28, 0x8000},
         {0x1ED9, 0x1C48, 0x9930, 0x9B1F, 0x1B32, 0x9FBF, 0x9A16, 0x1B63, 0x9D91, 0x9FA2, 0x9AEE,
          0x1902, 0x9C2A, 0x9D37, 0x192D, 0x9A1D},
         0x00000000,
         0x0000C2D8},
        {{0x9A0F, 0x19BC, 0x0000, 0x8000, 0x0000, 0x0000, 0x1BA4, 0xA171, 0x1DA6, 0x9D72, 0x19DE,
          0x1FA3, 0x9D89, 0x8000, 0x1947, 0x8000},
         {0x99EE, 0x1FDB, 0x1C40, 0x9BB4, 0x1F0C, 0x9F47, 0x9BEC, 0x1B0E, 0x9D9B, 0x9E73, 0x9BE0,
          0x19A9, 0x1B4A, 0x9989, 0x195F, 0x9BE6},
         0x00000000,
         0x8000C460},
        {{0x1BAE, 0x199F, 0x987E, 0x8000, 0x9A6E, 0x8000, 0x9F13, 0x97B1, 0x0000, 0x987D, 0x15FE,
          0x0000, 0x9BA2, 0x8000, 0x995D, 0x95D0},
         {0x182E, 0x19B9, 0x19AB, 0x9D48, 0xA025, 0x200D, 0x1BD7, 0x1800, 0x9E40, 0xA1F6, 0x9B94,
          0x1B4C, 0x2005, 0xA0F3, 0x1545, 0x18AF},
         0x00000000,
         0x800050A8},
        {{0x8000, 0x1BFE, 0x0000, 0x94B0, 0x2043, 0xA0A5, 0x153C, 0x9D55, 0x0000, 0x0000, 0xA275,
          0x944C, 0x9B7A, 0x1DD2, 0x963B, 0x8000},
         {0x9B3D, 0x1B43, 0x97F3, 0xA015, 0x15B3, 0x965A, 0x9FF1, 0x99CF, 0x9A92, 0x2097, 0x94C3,
          0x18D9, 0x1939, 0x96DA, 0x1E9A, 0x9C21},
         0x00000000,
         0x000000B0},
        {{0x8000, 0x028A, 0x1E44, 0x8A70, 0x84F2, 0x20F4, 0x1928, 0x0A70, 0x8000, 0x914A, 0x1380,
          0x9106, 0x0000, 0x878E, 0x131A, 0x8496},
         {0xA0E8, 0x0069, 0x08F2, 0x811A, 0x9AA2, 0x0E0F, 0xA2BE, 0x13D2, 0xA35D, 0x10F4, 0x0D12,
          0x802C, 0x10ED, 0x1558, 0x1C5E, 0x9D4C},
         0x80000000,
         0x80007CB0},
        {{0x87C2, 0x8000, 0x822A, 0x979E, 0x04FC, 0x1269, 0x1145, 0x1574, 0x0435, 0x0136, 0x9772,
          0x0000, 0x1643, 0x2084, 0x0000, 0x8A93},
         {0x9DEF, 0x02FB, 0x8912, 0x1CDB, 0x8C5B, 0x26BD, 0x92AB, 0x8875, 0x8656, 0x8841, 0x8D26,
          0x8590, 0x0B78, 0x913A, 0x8F53, 0x1A63},
         0x00000000,
         0x000002AF},
        {{0x1D7B, 0x85F6, 0x0000, 0x03D9, 0x205C, 0x0108, 0x0000, 0x040B, 0x154B, 0x0A49, 0x9D62,
          0x12E2, 0x9650, 0x17B1, 0x0000, 0x8000},
         {0x83C7, 0x0569, 0x079C, 0x0919, 0x0663, 0x8042, 0x1C91, 0x1BB8, 0x266E, 0x09D5, 0x0D68,
          0x9CA8, 0x23E1, 0x0BCA, 0x19AA, 0x839D},
         0x00000000,
         0x000052F0},
        {{0x2616, 0x8F85, 0x0000, 0x0FA3, 0x9E73, 0x8172, 0x8934, 0x027F, 0x13E6, 0x802E, 0x8F98,
          0x0BC4, 0x041C, 0x8721, 0x8000, 0x0000},
         {0x83A9, 0x17A0, 0x0D18, 0x173A, 0x9B8B, 0xA12A, 0x20CC, 0x0047, 0x96E3, 0x9001, 0x99B1,
          0xA6AC, 0x0581, 0x07C6, 0x0438, 0x8FB7},
         0x00000000,
         0x0000083F},
    };
    for (size_t i = 0; i < sizeof seen / sizeof *seen; i++)
        assert_int_equal(
            ctxkv__bits(ctxkv__mma16(seen[i].a, seen[i].b, ctxkv__float(seen[i].acc))),
            seen[i].result);
}

static void mma16_random(void **unused) {
    (void)unused;
    for (int n = 0; n < 60000; n++) {
        uint16_t a[16], b[16];
        int kind = n % KINDS, spread = (int)(rnd() % 25);
        for (int i = 0; i < 16; i++) {
            a[i] = value(kind, spread);
            b[i] = value(kind == SMALL && n % 2 ? SPREAD : kind, spread);
            if (kind == RAW && n % 3) { // few specials, or nothing is left but NaN
                if ((a[i] & 0x7F80) == 0x7F80) a[i] ^= 0x0080;
                if ((b[i] & 0x7F80) == 0x7F80) b[i] ^= 0x4000;
            }
        }
        if (n % 7 == 0) // exact cancellation
            for (int i = 0; i < 16; i += 2) {
                a[i + 1] = a[i];
                b[i + 1] = b[i] ^ 0x8000;
            }
        uint32_t acc = (uint32_t)rnd();
        if (n % 4 == 1) acc = 0;
        if (n % 4 == 2) acc = (acc & 0x807FFFFF) | (uint32_t)(127 + rnd() % 40) << 23;
        if (n % 11 == 0) acc &= 0x807FFFFF;
        same(a, b, acc);
    }
}

static void fill(uint16_t *v, uint16_t with) {
    for (int i = 0; i < 16; i++) v[i] = with;
}

static void mma16_edges(void **unused) {
    (void)unused;
    uint16_t a[16], b[16];
    // 16 products of 255*255 and a carried sum of the same exponent: past 31 bits, both signs.
    fill(a, 0x3FFF);
    fill(b, 0x3FFF);
    same(a, b, 0x3FFFFFFF);
    assert_int_equal(ctxkv__bits(ctxkv__mma16(a, b, ctxkv__float(0x3FFFFFFF))), 0x4283007F);
    fill(b, 0xBFFF);
    same(a, b, 0xBFFFFFFF);
    // Subnormal products and results, cut and not rounded; down to nothing.
    for (int field = 0; field < 140; field++) {
        fill(a, (uint16_t)(field << 7 | 0x55));
        fill(b, 0x007F);
        same(a, b, 0);
        same(a, b, 0x80000001);
        same(a, b, 0x007FFFFF);
    }
    // Overflow, also where only the sum passes.
    fill(a, 0x7F7F);
    fill(b, 0x7F7F);
    same(a, b, 0);
    fill(b, 0x3F80);
    same(a, b, 0);
    same(a, b, 0xFF7FFFFF);
    // A product that counts with ea + eb although its significand is 2 or more.
    fill(a, 0);
    fill(b, 0);
    a[0] = b[0] = 0x3FFF;
    a[1] = 0x3F80;
    b[1] = 0x3301;
    same(a, b, 0x33800001);
    assert_int_equal(ctxkv__bits(ctxkv__mma16(a, b, 0.0f)), 0x407E0100);
}

static void mma16_specials(void **unused) {
    (void)unused;
    static const uint16_t list[] = {0x0000, 0x8000, 0x7F80, 0xFF80, 0x7FC1, 0xFF81, 0x3F80, 0x8001};
    static const uint32_t accs[] = {0, 0x80000000, 0x7F800000, 0xFF800000, 0x7FC00000, 0x3F800000};
    for (size_t x = 0; x < 8; x++)
        for (size_t y = 0; y < 8; y++)
            for (size_t z = 0; z < 64; z++)
                for (size_t s = 0; s < 6; s++) {
                    uint16_t a[16], b[16];
                    fill(a, 0x3F80);
                    fill(b, 0x3F80);
                    a[3] = list[x];
                    b[3] = list[y];
                    a[11] = list[z % 8];
                    b[11] = list[z / 8];
                    same(a, b, accs[s]);
                }
    uint16_t none[16] = {0};
    // A negative sum cut to nothing gives +0, as on the H200 (tests/device, hostile projections);
    // one that leaves a subnormal keeps its sign.
    uint16_t small[16] = {0x1A00}, minus_smaller[16] = {0x9A00}, minus_tiny[16] = {0x9880};
    assert_int_equal(ctxkv__bits(ctxkv__mma16(small, minus_smaller, 0.0f)), 0);
    small[0] = 0x1C80;
    assert_int_equal(ctxkv__bits(ctxkv__mma16(small, minus_tiny, 0.0f)), 0x80000002);
    assert_int_equal(ctxkv__bits(ctxkv__mma16(none, none, ctxkv__float(0x80000000))), 0);
    assert_int_equal(ctxkv__bits(ctxkv__mma16(none, none, ctxkv__float(0xFFC00000))), 0x7FFFFFFF);
}

// Operands may lie at odd addresses.
static void mma16_odd_address(void **unused) {
    (void)unused;
    unsigned char raw[2][33];
    uint16_t a[16], b[16];
    for (int i = 0; i < 16; i++) {
        a[i] = value(SPREAD, 9);
        b[i] = value(SPREAD, 9);
    }
    memcpy(raw[0] + 1, a, 32);
    memcpy(raw[1] + 1, b, 32);
    assert_int_equal(
        ctxkv__bits(ctxkv__mma16(raw[0] + 1, raw[1] + 1, 1.5f)), mma16_by_definition(a, b, 1.5f));
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(rsqrt_square_all),  cmocka_unit_test(rsqrt_checksum),
        cmocka_unit_test(rsqrt_specials),    cmocka_unit_test(rsqrt_scales),
        cmocka_unit_test(bf16_rounding),     cmocka_unit_test(mma16_random),
        cmocka_unit_test(mma16_edges),       cmocka_unit_test(mma16_specials),
        cmocka_unit_test(mma16_odd_address), cmocka_unit_test(mma16_far_down)};
    return cmocka_run_group_tests(tests, 0, 0);
}

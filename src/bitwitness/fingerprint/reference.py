"""The definition of a fingerprint, as slow and plain as it can be said, with the proof of what it guarantees.

This module exists so that every fast implementation has one thing to be compared with: plain Python integers over
bytes, no torch, no NumPy. It is the oracle of the tests and the specification for a kernel in any language.

Definition
----------
The raw bytes of a tensor in logical (row-major) order, zero-padded to a multiple of four, are read as little-endian
unsigned 32-bit words b_0 ... b_{n-1}; every dtype in the same way. The digest is three numbers modulo 2^64, each
returned as the signed 64-bit integer with the same bits:

    sum       S = salt_0 + sum_k b_k
    weighted  W = salt_1 + sum_k (k + 1) b_k
    hash      H = salt_2 + sum_k r_k b_k,      r_k = w_{k div C} * u_{k mod C},  C = ROW_WORDS

with odd weights drawn from the seed by a counter-based generator: w_i 64-bit, u_j 32-bit, see `outer_weight` and
`inner_weight`. H is the multilinear hash of Lemire and Kaser, "Strongly universal string hashing is fast"
(arXiv 1202.4961), with weights of rank one, so that any position of a tensor of any length costs one multiplication
and n/C + C weights instead of a table of n. The salts depend on dtype and shape only (`salts`): equal bytes of another
dtype or shape get another digest, and they cancel in the difference of two digests of like tensors, on which
everything below rests.

Guarantees
----------
Compare the words b of a tensor with the words b' after a change, same dtype and shape; d_k = b'_k - b_k, so
|d_k| < 2^32, and n < 2^32 words.

*One word changed: certain to show, in S and in H alone.* d is not 0 modulo 2^64; an odd r_k is a unit.

*Two words changed: certain to show.* If S does not show it, d_q = -d_p. Then W changes by d_p (p - q), and
0 < |d_p| |p - q| < 2^32 * 2^32 = 2^64, which is not 0 modulo 2^64.

*A swap of two unequal elements of at most four bytes: certain to show*, since it changes one or two words.

*Any other change chosen without knowledge of the seed is missed with probability at most 33 * 2^-32 < 2^-26*, the
weights taken as independent and uniform among the odd numbers of their width. Let v be the number of times 2 divides
all the d_k, so v <= 31, write d_k = 2^v e_k and m = 64 - v >= 33. With the words laid out in rows of C,
g_i = sum_j u_j e_ij, a miss of H means

    sum_i w_i g_i = 0  (mod 2^m).

Some e_ij is odd, say in row a. Write u_j = 1 + 2 x_j with x_j uniform on [0, 2^31). With all other x fixed, g_a = 0
(mod 2^t) leaves at most one residue of that x_j modulo 2^(t-1). Let T be the smallest number of times 2 divides a g_i
(at most m); then

    P[T >= t] <= 2^-min(t-1, 31)        for t >= 1.

Given the u, write w_i = 1 + 2 y_i with y_i uniform on [0, 2^63): the equation leaves at most one residue modulo
2^(m-T-1) of the y_i of a row where T is attained, so P[miss | T] <= f(T) with f(t) = 2^-(m-1-t) for t < m and
f(m) = 1 = f(m-1). Since f(t) - f(t-1) = 2^-(m-t) for 1 <= t <= m-1, summation by parts gives

    P[miss] = E f(T) <= f(0) + sum_{t=1}^{m-1} P[T >= t] 2^-(m-t)
                     <= 2^-(m-1) + sum_{t=1}^{m-1} 2^-min(t-1, 31) 2^-(m-t).

For m = 33 that is 2^-32 + 32 * 2^-32 = 33 * 2^-32 = 2^-26.96; it falls as m grows and stays above 2^-31, the price of
32-bit inner weights (`miss_bound` computes it). They are worth that price: on a GPU one word costs one 32 x 32 + 64
multiply-add. Weights of the form w_i + u_j, equally cheap, would be useless: a change of (+d, -d, -d, +d) on the
corners of a rectangle of rows and columns would cancel for every seed.

None of this concerns a faulty device that computes its own fingerprint, nor an adversary who knows the seed. The
weights come from splitmix64, not from a true random source; "uniform" is the usual modelling assumption.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

ROW_WORDS = 2048
"""C of the definition: words that share one outer weight."""

MASK64 = (1 << 64) - 1
GOLDEN = 0x9E3779B97F4A7C15
"""Increment of splitmix64: the odd number nearest to 2^64 divided by the golden ratio."""

OUTER_STREAM, INNER_STREAM, COMBINE_STREAM, SALT_STREAM = 1, 2, 3, 4

Digest = tuple[int, int, int]


@dataclass(frozen=True)
class Ring:
    """The sizes in the definition, as parameters so that the tests can exhaust a small model with the same code.

    word_bits: width of a word; ring_bits: all sums are modulo 2**ring_bits; inner_bits: width of the inner weights;
    row_words: C. The guarantees need positions below 2**(ring_bits - word_bits).
    """

    word_bits: int = 32
    ring_bits: int = 64
    inner_bits: int = 32
    row_words: int = ROW_WORDS

    @property
    def modulus(self) -> int:
        """The number all sums are taken modulo."""
        return 1 << self.ring_bits


REAL_RING = Ring()


def mix64(value: int) -> int:
    """The finalizer of splitmix64 (Steele, Lea, Flood, OOPSLA 2014): a bijection of 64-bit integers."""
    value &= MASK64
    value = (value ^ (value >> 30)) * 0xBF58476D1CE4E5B9 & MASK64
    value = (value ^ (value >> 27)) * 0x94D049BB133111EB & MASK64
    return value ^ (value >> 31)


def stream_start(seed: int, stream: int) -> int:
    """Where stream number `stream` of `seed` (any integer, taken modulo 2^64) begins."""
    return mix64(seed + mix64(stream * GOLDEN))


def draw(start: int, index: int) -> int:
    """Number `index` (from 0) of the splitmix64 stream that begins at `start`: a 64-bit integer."""
    return mix64(start + (index + 1) * GOLDEN)


def outer_weight(seed: int, row: int) -> int:
    """w of row `row`: an odd 64-bit integer."""
    return draw(stream_start(seed, OUTER_STREAM), row) | 1


def inner_weight(seed: int, column: int) -> int:
    """u of column `column`: an odd 32-bit integer, the upper half of its draw with the lowest bit set."""
    return draw(stream_start(seed, INNER_STREAM), column) >> 32 | 1


def combine_weight(seed: int, index: int) -> int:
    """c of the digest at `index` in `combine`: an odd 64-bit integer."""
    return draw(stream_start(seed, COMBINE_STREAM), index) | 1


@functools.lru_cache(maxsize=65536)
def salts(dtype: str, shape: tuple[int, ...]) -> Digest:
    """What dtype (torch's name without the prefix, e.g. "float32") and shape add to the three numbers, each in [0, 2^64).

    Independent of the seed, so that two jobs with different seeds still agree on the two sums of equal tensors.
    """
    name = dtype.encode("ascii")
    state = stream_start(len(name), SALT_STREAM)
    for item in (*name, len(shape), *shape):
        state = mix64(state + GOLDEN) ^ item
    first, second, third = (draw(state, index) for index in range(3))
    return first, second, third


def words_of(data: bytes, word_bytes: int = 4) -> list[int]:
    """The little-endian unsigned words of `data`, zero-padded at the end to a whole number of words."""
    return [int.from_bytes(data[start : start + word_bytes], "little") for start in range(0, len(data), word_bytes)]


def digest_words(words: Iterable[int], outer: Callable[[int], int], inner: Callable[[int], int], ring: Ring) -> Digest:
    """Sum, weighted sum and hash of `words` in `ring`, without salts, each in [0, ring.modulus).

    `outer(row)` and `inner(column)` give the odd weights.
    """
    total = weighted = hashed = 0
    for index, word in enumerate(words):
        row, column = divmod(index, ring.row_words)
        total += word
        weighted += (index + 1) * word
        hashed += outer(row) * inner(column) * word
    return total % ring.modulus, weighted % ring.modulus, hashed % ring.modulus


def signed(value: int) -> int:
    """The signed 64-bit integer with the bits of `value` modulo 2^64."""
    value &= MASK64
    return value - (1 << 64) if value >> 63 else value


def fingerprint_bytes(data: bytes, dtype: str, shape: Sequence[int], seed: int = 0) -> Digest:
    """The digest of a tensor given by its bytes in row-major order, as three signed 64-bit integers.

    dtype is torch's name without the prefix; shape is in elements; seed is any integer, taken modulo 2^64.
    """
    outer = functools.lru_cache(maxsize=None)(functools.partial(outer_weight, seed))
    inner = functools.lru_cache(maxsize=None)(functools.partial(inner_weight, seed))
    plain = digest_words(words_of(data), outer, inner, REAL_RING)
    first, second, third = (signed(value + salt) for value, salt in zip(plain, salts(dtype, tuple(shape)), strict=True))
    return first, second, third


def combine_digests(digests: Sequence[Digest], seed: int) -> Digest:
    """sum_t c_t * digest_t modulo 2^64, column by column, as signed 64-bit integers; c_t = `combine_weight(seed, t)`."""
    weights = [combine_weight(seed, index) for index in range(len(digests))]
    columns = ([digest[column] for digest in digests] for column in range(3))
    first, second, third = (signed(sum(w * v for w, v in zip(weights, values, strict=True))) for values in columns)
    return first, second, third


def miss_bound(valuation: int, ring: Ring = REAL_RING) -> Fraction:
    """The bound on a miss of the hash by the last line of the proof, exactly.

    valuation: how often 2 divides all differences of words, 0 <= valuation < ring.word_bits.
    """
    m = ring.ring_bits - valuation
    tail = (Fraction(1, 2 ** (min(t, ring.inner_bits) - 1 + m - t)) for t in range(1, m))
    return min(Fraction(1), Fraction(1, 2 ** (m - 1)) + sum(tail, Fraction(0)))

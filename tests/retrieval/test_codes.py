"""Bit order, sign(0), padding and limits of packed codes, by hand."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hashseek.retrieval.codes import as_words, check_codes, check_n_bits, code_size, pack, pad, unpack
from hashseek.retrieval.errors import BadCodes
from support import hamming_oracle as hamming


def test_bit_j_lies_in_byte_j_over_8_at_bit_j_mod_8():
    outputs = np.full((1, 12), -1.0)
    outputs[0, [0, 3, 9]] = 1.0
    assert pack(outputs).tolist() == [[0b0000_1001, 0b0000_0010]]


def test_zero_and_minus_zero_give_0_and_anything_above_gives_1():
    assert pack([[0.0, -0.0, 1e-38, -1e-38, np.inf, -np.inf]]).tolist() == [[0b01_0100]]


def test_integers_are_outputs_too():
    assert pack(np.array([[3, 0, -2, 1]])).tolist() == [[0b1001]]


def test_nan_is_refused_since_it_has_no_sign():
    with pytest.raises(BadCodes, match="NaN"):
        pack([[1.0, np.nan]])


@pytest.mark.parametrize(("n_bits", "size"), [(1, 1), (8, 1), (9, 2), (12, 2), (36, 5), (48, 6), (1024, 128)])
def test_a_code_has_as_many_bytes_as_its_bits_need(n_bits, size):
    assert code_size(n_bits) == size
    assert pack(np.ones((3, n_bits))).shape == (3, size)


@pytest.mark.parametrize("n_bits", [0, -1, 1025])
def test_lengths_out_of_range_are_refused_by_number(n_bits):
    with pytest.raises(BadCodes, match=f"1 to 1024 bits, not {n_bits}"):
        check_n_bits(n_bits)


def test_outputs_of_no_bits_or_too_many_or_the_wrong_shape_are_refused():
    for outputs in (np.zeros((2, 0)), np.zeros((2, 1025)), np.zeros(3), np.zeros((1, 2, 3))):
        with pytest.raises(BadCodes):
            pack(outputs)


@given(
    st.integers(1, 1024).flatmap(
        lambda k: arrays(np.uint8, st.tuples(st.integers(0, 5), st.just(k)), elements=st.integers(0, 1))
    )
)
def test_unpacking_gives_back_what_was_packed(bits):
    codes = pack(bits.astype(np.float32) - 0.5)
    assert np.array_equal(unpack(codes, bits.shape[1]), bits)
    assert check_codes(codes, bits.shape[1]) is codes


@given(st.integers(1, 64), st.integers(0, 9), st.integers(0, 2**32))
def test_padding_and_words_change_no_distance(n_bits, extra, seed):
    rng = np.random.default_rng(seed)
    codes = pack(rng.standard_normal((6, n_bits)))
    expected = hamming.distances(codes, codes)
    assert np.array_equal(hamming.distances(*[pad(codes, codes.shape[1] + extra)] * 2), expected)
    words = as_words(codes)
    assert np.array_equal(np.bitwise_count(words[:, None] ^ words[None]).sum(axis=-1), expected)


def test_padding_to_less_is_refused():
    with pytest.raises(BadCodes, match="cannot be padded"):
        pad(np.zeros((1, 3), np.uint8), 2)


@pytest.mark.parametrize(
    ("codes", "reason"),
    [
        (np.zeros((2, 2), np.int64), "uint8"),
        (np.zeros(2, np.uint8), "shape"),
        (np.zeros((2, 3), np.uint8), "2 bytes, not 3"),
        (np.array([[0, 0], [0, 0b0001_0000]], np.uint8), "beyond the 12 bits"),
    ],
)
def test_codes_that_are_not_12_bits_are_refused(codes, reason):
    with pytest.raises(BadCodes, match=reason):
        check_codes(codes, 12)

"""Bit order, sign(0), padding and limits of packed codes, by hand."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from hashseek.retrieval.codes import check_codes, check_n_bits, code_size, pack, pad, unpack
from hashseek.retrieval.errors import BadCodes


def test_bit_j_lies_in_byte_j_over_8_at_bit_j_mod_8():
    outputs = np.full((1, 12), -1.0)
    outputs[0, [0, 3, 9]] = 1.0
    assert pack(outputs).tolist() == [[0b0000_1001, 0b0000_0010]]


def test_zero_and_minus_zero_give_0_and_anything_above_gives_1():
    assert pack([[0.0, -0.0, 1e-38, -1e-38, np.inf, -np.inf]]).tolist() == [[0b01_0100]]
    assert pack(np.array([[3, 0, -2, 1]])).tolist() == [[0b1001]]


@pytest.mark.parametrize(("n_bits", "size"), [(1, 1), (8, 1), (9, 2), (12, 2), (36, 5), (48, 6), (1024, 128)])
def test_a_code_has_as_many_bytes_as_its_bits_need(n_bits, size):
    assert code_size(n_bits) == size
    assert pack(np.ones((3, n_bits))).shape == (3, size)


@pytest.mark.parametrize("n_bits", [0, -1, 1025])
def test_lengths_out_of_range_are_refused(n_bits):
    with pytest.raises(BadCodes, match=str(n_bits)):
        check_n_bits(n_bits)


@pytest.mark.parametrize("outputs", [np.zeros((2, 0)), np.zeros((2, 1025)), np.zeros(3), [[1.0, np.nan]]])
def test_outputs_that_are_no_codes_are_refused(outputs):
    with pytest.raises(BadCodes):
        pack(outputs)


@settings(deadline=None)
@given(
    st.integers(1, 1024).flatmap(
        lambda k: arrays(np.uint8, st.tuples(st.integers(0, 5), st.just(k)), elements=st.integers(0, 1))
    )
)
def test_unpacking_gives_back_what_was_packed(bits):
    codes = pack(bits.astype(np.float32) - 0.5)
    assert np.array_equal(unpack(codes, bits.shape[1]), bits)
    assert check_codes(codes, bits.shape[1]) is codes


@pytest.mark.parametrize("n_bits", [1, 12, 64])
def test_padding_appends_zero_bytes(n_bits):
    codes = pack(np.random.default_rng(n_bits).standard_normal((6, n_bits)))
    assert np.array_equal(pad(codes, codes.shape[1] + 3), np.hstack([codes, np.zeros((6, 3), np.uint8)]))


@pytest.mark.parametrize(
    "codes",
    [
        np.zeros((2, 2), np.int64),
        np.zeros(2, np.uint8),
        np.zeros((2, 3), np.uint8),
        np.array([[0, 0], [0, 0b0001_0000]], np.uint8),  # a bit beyond the twelfth
    ],
)
def test_codes_that_are_not_12_bits_are_refused(codes):
    for function in (check_codes, unpack):
        with pytest.raises(BadCodes):
            function(codes, 12)

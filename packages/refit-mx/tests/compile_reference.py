"""fp8 quantisation once more, one value at a time, from the public descriptions alone.

float8_e4m3fn after "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): a sign, four bits
of exponent with bias 7, three of mantissa, no infinities, NaN only where all of them are set.
Block scales after ``per_block_cast_to_fp8`` of DeepGEMM, tensor and channel scales after
``scaled_fp8_quant`` of vLLM.
"""

from __future__ import annotations

import bisect
import math

import numpy as np


def e4m3_value(code: int) -> float:
    """What a byte stands for."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = [e4m3_value(code) for code in range(0x7F)]


def to_e4m3(value: float) -> int:
    """The byte whose value is nearest; of two as near, the even one; past the range, its end."""
    sign = 0x80 if math.copysign(1.0, value) < 0 else 0
    magnitude = abs(float(value))
    if magnitude >= POSITIVE[-1]:
        return sign | 0x7E
    above = bisect.bisect_right(POSITIVE, magnitude)
    below = above - 1
    down, up = magnitude - POSITIVE[below], POSITIVE[above] - magnitude
    if down == up:
        return sign | (below if below % 2 == 0 else above)
    return sign | (below if down < up else above)


def block_scaled(matrix: np.ndarray, *, power_of_two: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bytes and float32 scales of a float32 matrix in blocks of 128 x 128."""
    rows, columns = matrix.shape
    codes = np.zeros((rows, columns), np.uint8)
    scales = np.zeros((math.ceil(rows / 128), math.ceil(columns / 128)), np.float32)
    for i in range(scales.shape[0]):
        for j in range(scales.shape[1]):
            block = (slice(128 * i, 128 * i + 128), slice(128 * j, 128 * j + 128))
            largest = max(np.float32(1e-4), np.abs(matrix[block]).max())
            scale = np.float32(largest) / np.float32(448)
            if power_of_two:
                exponent = -200
                while 2.0**exponent < float(scale):
                    exponent += 1
                scale = np.float32(2.0**exponent)
            scales[i, j] = scale
            inverse = np.float32(1) / scale
            scaled = matrix[block] * inverse
            codes[block] = [[to_e4m3(value) for value in row] for row in scaled]
    return codes, scales


def row_scaled(matrix: np.ndarray, *, whole: bool) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of a float32 matrix and a float32 scale a row; with ``whole`` the same for all rows."""
    rows, columns = matrix.shape
    least = np.float32(1.0 / (448.0 * 512.0))
    scales = np.zeros((rows, 1), np.float32)
    for i in range(rows):
        part = matrix if whole else matrix[i]
        scales[i, 0] = max(np.abs(part).max() / np.float32(448), least)
    codes = np.zeros((rows, columns), np.uint8)
    for i in range(rows):
        codes[i] = [to_e4m3(value) for value in matrix[i] / scales[i, 0]]
    return codes, scales


def values_of(codes: np.ndarray) -> np.ndarray:
    """What bytes stand for, as float64."""
    return np.array([e4m3_value(code) for code in range(256)])[codes]

"""Reference fp8 quantization, one value at a time, written from the public descriptions only.

float8_e4m3fn follows "FP8 Formats for Deep Learning" (Micikevicius et al., 2022): a sign, four bits
of exponent with bias 7, three bits of mantissa, no infinities, and NaN only if exponent and
mantissa are all ones. Block scales follow ``per_block_cast_to_fp8`` of DeepGEMM; tensor and channel
scales follow ``scaled_fp8_quant`` of vLLM.
"""

from __future__ import annotations

import bisect
import math

import numpy as np


def e4m3_value(code: int) -> float:
    """Return the value of a byte."""
    sign = -1.0 if code & 0x80 else 1.0
    exponent, mantissa = (code >> 3) & 0xF, code & 0x7
    if exponent == 15 and mantissa == 7:
        return math.nan
    if exponent == 0:
        return sign * mantissa / 8 * 2.0**-6
    return sign * (1 + mantissa / 8) * 2.0 ** (exponent - 7)


POSITIVE = [e4m3_value(code) for code in range(0x7F)]


def to_e4m3(value: float) -> int:
    """Return the byte with the nearest value; ties go to the even byte, overflow to the maximum."""
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
    """Return bytes and float32 scales of a float32 matrix, with a scale per 128 x 128 block."""
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


def row_scaled(matrix: np.ndarray, *, per_tensor: bool) -> tuple[np.ndarray, np.ndarray]:
    """Return bytes and float32 scales of a float32 matrix, with a scale per row.

    With ``per_tensor``, all rows have the same scale.
    """
    rows, columns = matrix.shape
    minimum = np.float32(1.0 / (448.0 * 512.0))
    scales = np.zeros((rows, 1), np.float32)
    for i in range(rows):
        part = matrix if per_tensor else matrix[i]
        scales[i, 0] = max(np.abs(part).max() / np.float32(448), minimum)
    codes = np.zeros((rows, columns), np.uint8)
    for i in range(rows):
        codes[i] = [to_e4m3(value) for value in matrix[i] / scales[i, 0]]
    return codes, scales

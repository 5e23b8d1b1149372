"""Loss scales after every step as DeepSpeed 0.19.8 sets them, recorded from its engine with one gloo rank on the CPU.

The script: one `Linear` in fp16, `initial_scale_power` 8, `min_loss_scale` 1; the loss of every step marked "x" is infinite. Stages 1 to 3
gave the same scales. At stage 0 `FP16_Optimizer` ignores both hysteresis keys and behaves as with hysteresis 1.
"""

MARKS = "..x...xx..x.xxx.......x......"
# (loss_scale_window, hysteresis, consecutive_hysteresis) -> the scale after every step, as powers of two
_POWERS = {
    (2, 1, False): "8 8 7 7 7 8 7 6 6 6 5 5 4 3 2 2 2 3 3 4 4 5 4 4 4 5 5 6 6",
    (2, 2, False): "8 8 8 8 8 9 9 8 8 8 7 7 6 5 4 4 4 5 5 6 6 7 7 7 7 8 8 9 9",
    (3, 2, False): "8 8 8 8 8 8 7 6 6 6 5 5 4 3 2 2 2 2 3 3 3 4 4 4 4 4 5 5 5",
    (3, 3, True): "8 8 8 8 8 8 8 8 8 8 8 8 8 8 7 7 7 7 8 8 8 9 9 9 9 9 10 10 10",
    (1, 2, False): "8 9 9 9 10 11 11 10 10 11 11 11 10 9 8 8 9 10 11 12 13 14 14 14 15 16 17 18 19",
    (3, 1, False): "8 8 7 7 7 7 6 5 5 5 4 4 3 2 1 1 1 1 2 2 2 3 2 2 2 2 3 3 3",
}
SCALES = {options: [2.0 ** int(power) for power in powers.split()] for options, powers in _POWERS.items()}

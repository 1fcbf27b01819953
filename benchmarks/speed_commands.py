"""How the files of benchmarks/results were made that do not say it themselves, as docs/results.md tells it.

The benchmarks write their command into newer files themselves (command_line.py), so that nothing is added here.
A file that is not here and says nothing is of the program that its name begins with, with options that nobody knows.
"""

CNN, ESTIMATOR, HMC, KERNELS, RECOMMENDER, VCD = (
    f"python benchmarks/peers/{name}.py"
    for name in ("cnn", "estimator", "hmc", "kernels", "recommender", "vcd")
)
COMMANDS: dict[str, tuple[str, ...]] = {
    "2026-11-15_cnn_h200_accuracy": (
        "hotloop cnn train --config cifar_resnet20 --seed 1",
        "hotloop cnn train --config mnist_resnet8 --seed 1",
        "hotloop cnn train --config cifar_resnet8 --num-epochs 20 --ckpts-per-epoch 1/20 --lr-schedule-params "
        '\'{"initial_learning_rate": 0.00078125, "epochs_to_total_decay": 18}\' --precision MODE --seed SEED',
    ),
    "2026-11-15_cnn_h200_b256": (f"{CNN} --device gpu --cases resnet50-b256 --rounds 3 --seconds 1",),
    "2026-11-15_cnn_h200_b256_ordered": (
        f"{CNN} --device gpu --cases resnet50-b256 --no-compile --rounds 3 --seconds 1",
    ),
    "2026-11-15_cnn_h200_b512": (f"{CNN} --device gpu --cases resnet50-b512 --rounds 3 --seconds 1",),
    "2026-11-15_cnn_h200_b512_ordered": (f"{CNN} --device gpu --cases resnet50-b512 --rounds 5 --seconds 1",),
    "2026-11-15_cnn_h200_infer_folded": (
        f"{CNN} --device gpu --cases resnet50-infer-b256 --rounds 5 --seconds 1",
    ),
    "2026-11-15_cnn_h200_infer_resnet8": (
        f"{CNN} --device gpu --cases resnet50-infer-b256,resnet8-b64 --rounds 3 --seconds 1",
    ),
    "2026-11-15_estimator_cpu": (f"{ESTIMATOR} --rounds 9",),
    "2026-11-15_estimator_h200": ("hotloop estimator --recipe RECIPE --seed SEED --evaluate-every 5",),
    "2026-11-15_estimator_h200_parity": (f"{ESTIMATOR} --device gpu --no-keras --rounds 5 --seconds 1",),
    "2026-11-15_kernels_cpu": (
        f"{KERNELS} --seconds 0.25 --rounds 11",
        f"{KERNELS} --seconds 0.25 --rounds 9",
    ),
    "2026-11-15_kernels_h200": (
        f"{KERNELS} --device gpu --rounds 5 --seconds 0.15 --cases inference before",
    ),
    "2026-11-15_lstm_h200": (f'{KERNELS} --device gpu --rounds 5 --seconds 0.1 --cases "lstm B"',),
    "2026-11-15_ml100k_cpu": (
        "hotloop recommender train --config ml-100k --split SPLIT --precision MODE --seed SEED",
    ),
    "2026-11-15_peers_cpu": ("hotloop bench peers --rounds 5 --seconds 1",),
    "2026-11-15_recommender_cpu": (f"{RECOMMENDER} --rounds 9 --seconds 2 --evaluate 256",),
    "2026-11-15_recommender_h200": tuple(
        f"{RECOMMENDER} --device gpu --shape {shape} --rounds 5 --seconds 1{more}"
        for shape, more in (
            ("full --size 512 --batch-size 64", " --evaluate 512"),
            ("full --size 512 --batch-size 8", " --evaluate 512"),
            ("3m --size 128 --batch-size 64", ""),
        )
    ),
    "2026-11-15_vcd_cpu": (f"{VCD} --rounds 7 --seconds 2.5",),
    "2026-11-15_vcd_h200": ("hotloop vcd train --data MNIST_FOLDER --method METHOD --log-every 10000",),
    "2026-11-17_persistent_h200": (),
    "2026-11-18_bulk_lists_h200": ("python benchmarks/bulk_lists.py --repeat 2",),
    "2026-11-18_cnn_cpu_zen5": (f"{CNN} --rounds 5 --seconds 2",),
    "2026-11-18_estimator_cpu_zen5": (f"{ESTIMATOR} --rounds 7 --seconds 1",),
    "2026-11-18_estimator_cpu_zen5_again": (f"{ESTIMATOR} --rounds 9 --seconds 1 --no-keras --no-nnx",),
    "2026-11-18_first_update_h200": tuple(
        f"HOTLOOP_LOOP={loop} python benchmarks/first_update.py --device gpu{cases}"
        for loop in ("scan", "blocks")
        for cases in ("", " --cases resnet50")
    ),
    "2026-11-18_first_update_h200_ahead": (
        "python benchmarks/first_update.py --device gpu --cases cifar_resnet8 estimator resnet50",
    ),
    "2026-11-18_hmc_cpu_1": (f"{HMC} --chains 1 --rounds 5",),
    "2026-11-18_hmc_cpu_64": (f"{HMC} --chains 64 --rounds 3",),
    "2026-11-18_hmc_h200_1": (f"{HMC} --device gpu --chains 1 --draws 2000 --rounds 2",),
    "2026-11-18_hmc_h200_1_gaussian": (
        f"{HMC} --device gpu --chains 1 --cases gaussian --skip nuts --rounds 3",
    ),
    "2026-11-18_hmc_h200_4096": (f"{HMC} --device gpu --chains 4096 --rounds 2",),
    "2026-11-18_kernels_cpu_zen5": (
        f'{KERNELS} --rounds 9 --seconds 0.5 --limit 30 --cases "B1 " lstm-multi grouped dense "B64 T25"',
    ),
    "2026-11-18_kernels_cpu_zen5_large": (f'{KERNELS} --rounds 7 --seconds 1 --cases "B256 T100"',),
    "2026-11-18_photographs_cpu": ("python benchmarks/photographs.py --images 48 --rounds 7",),
    "2026-11-18_photographs_cpu_again": ("python benchmarks/photographs.py --images 48 --rounds 7",),
    "2026-11-18_photographs_h200": ("python benchmarks/photographs.py --images 48 --rounds 3",),
    "2026-11-18_recommender_cpu_zen5": (f"{RECOMMENDER} --rounds 7 --seconds 1",),
    "2026-11-18_resnet50_kernels_h200": ("python benchmarks/kernel_times.py",),
    "2026-11-18_vcd_cpu_zen5": (f"{VCD} --rounds 7 --seconds 1",),
    "2026-11-19_estimator_cpu": (f"{ESTIMATOR} --rounds 5 --seconds 1",),
    "2026-11-19_hmc_cpu_4096": (f"{HMC} --cases schools --chains 4096 --skip nuts --rounds 3",),
    "2026-11-19_hmc_h200_4096_logistic": (f"{HMC} --device gpu --cases logistic --chains 4096 --rounds 2",),
    "2026-11-19_hmc_h200_64": (f"{HMC} --device gpu --chains 64 --rounds 2",),
    "2026-11-19_kernels_cpu": (
        f'{KERNELS} --rounds 5 --seconds 0.3 --limit 20 --cases "B1 " lstm-multi grouped dense "B64 T25"',
    ),
    "2026-11-19_kernels_h200": (
        f'{KERNELS} --device gpu --rounds 5 --seconds 0.05 --cases grouped "rnn B1024" dense "lstm B64"',
    ),
    "2026-11-19_kernels_h200_grouped": (
        f'{KERNELS} --device gpu --rounds 4 --seconds 0.03 --cases "grouped-conv 4x56"',
    ),
    "2026-11-19_photographs_cpu": ("python benchmarks/photographs.py --images 48 --rounds 7",),
    "2026-11-19_ranking_epochs_cpu": (
        "HOTLOOP_DATA=DATA taskset -c 0 python benchmarks/ranking.py --skip ours recbole --threads 1 --rounds 15",
    ),
    "2026-11-19_recommender_cpu": (f"{RECOMMENDER} --rounds 5 --seconds 1",),
    "2026-11-19_results_cpu": ("python benchmarks/time_to_result.py --data DATA --limit 1100",),
    "2026-11-19_vcd_cpu": (f"{VCD} --rounds 5 --seconds 1",),
}
NOTES = {
    "2026-11-15_kernels_cpu": "two runs put together: the second is commit cda95c3, of the rows that are neither B1 T5 "
    "nor lstm-multi",
    "2026-11-15_recommender_h200": "the row of 311,315 users is of aca7891",
    "2026-11-17_persistent_h200": "`compare()` of `benchmarks/peers/kernels.py` for these cases, 7 rounds of 0.03 s, "
    "called from a program of a few lines",
    "2026-11-18_ranking_cpu": "parts were run one after the other between commits 47d071c and 256cfdc",
    "2026-11-18_speedrun_beside_h200": "and hiverge's own program, unchanged but for the number of its runs",
}
"""What is known of a file and is no command."""

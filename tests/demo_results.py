"""What a demo measures, made up: for the tests of its page and its command."""


def kernel(flops, moved, tflops):
    return {
        "items_per_second": 1000.0,
        "microseconds_per_iteration": 10.0,
        "seconds_per_step": 0.01,
        "seconds": {"all": [0.009, 0.01, 0.02], "median": 0.01, "p10": 0.009, "p90": 0.02},
        "tflops": tflops,
        "gbps": 5.0,
        "roofline": 0.25,
        "limits": {"bound": "memory", "peak_tflops": 0.1, "copy_gbps": 20.0},
        "cost": {"flops": flops, "bytes": moved},
        "checked": {"errors": {"output": 3e-7}},
    }


RESULTS = {
    "date": "2026-01-01",
    "device": "a <device>",
    "kernels": {"dense": kernel(1e6, 1e5, 0.02), "lstm training": kernel(1e7, 1e5, 0.04)},
    "hot_loop": [(1, 100.0, 80.0, 110.0), (1000, 900.0, 850.0, 910.0)],
    "losses": [4.0, 3.0, 2.0],
    "hmc": {
        "items_per_second": 4e6,
        "statistics": {name: {"value": 0.5, "error": 0.01} for name in ("acceptance", "mean", "variance")},
    },
    "histogram": {"counts": [1, 3, 2], "edges": [-1.0, 0.0, 1.0, 2.0], "chains": 8},
    "vcd": {
        "elbo": [-500.0, -200.0],
        "log_joint_z0": [-210.0, -205.0],
        "log_joint_zt": [-180.0, -170.0],
        "updates_per_second": 20.0,
        "batch_size": 100,
        "picture": "iVBORw0KGgo=",
    },
    "recommender": {
        "rmse": [2.8, 1.2, 0.9],
        "biases": 0.93,
        "users_per_second": 9e3,
        "users": 943,
        "items": 1682,
    },
    "cnn": {
        "model": "cifar_resnet8",
        "training": [0.2, 0.4, 0.7],
        "validation": [0.2, 0.4, 0.87],
        "updates_per_call": 25,
        "images": 3200,
        "images_per_second": 400.0,
    },
    "estimator": {
        "accuracy": [0.1, 0.3, 0.4],
        "updates": 120,
        "test_accuracy": 0.41,
        "images": 2000,
        "images_per_second": 500.0,
    },
    "environment": {"jax": "0.0", "hotloop": "0.0", "device_kinds": ["cpu"], "driver": None, "xla_flags": ""},
}

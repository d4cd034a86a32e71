"""Predict the time of a layer that nobody measured, with its interval: python examples/cost_model.py."""

import latbench as lb
from cost_models import Unanchored, evaluate

# Measured times of many layers on one CPU. The table comes with latbench; yours is the folder of `latbench sweep`.
TABLE = "bundled://intel-xeon-amx-2-threads"
X, y = lb.read_training_rows(TABLE, {"backend": "numba"})
print(f"{len(y)} measured points, from {y.min() * 1e6:.0f} µs to {y.max() * 1e3:.1f} ms")

# Errors are those on shapes that were held out, because neighbours of a measured point are easy.
model = lb.Boosted().fit(X, y)
figures = evaluate(model, X, y)
print(f"median error {figures['median']:.1%}; the 90% interval holds {figures['coverage']:.0%} of unseen shapes")

# One row for each point to predict: m outputs, k inputs, n tokens. The table settles the device and the threads.
sparsities = [0.5, 0.75, 0.9, 0.95]
unseen = lb.rows(shape=(1024, 1536, 128), pattern="shflbw:32", sparsity=sparsities, measured=X)
low, high = model.predict_interval(unseen, coverage=0.9)
for sparsity, seconds, least, most in zip(sparsities, model.predict(unseen), low, high, strict=True):
    print(
        f"1024x1536 on 128 tokens, {sparsity:.0%} zeros: {seconds * 1e6:.0f} µs ({least * 1e6:.0f}-{most * 1e6:.0f})"
    )

# Outside of the measured range the model refuses, and says why.
try:
    model.predict(unseen.assign(n=100_000))
except Unanchored as refusal:
    print(refusal)

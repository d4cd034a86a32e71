"""Predict the time of a layer that nobody measured, with its interval: python examples/cost_model.py."""

from cost_models import Boosted, Unanchored, evaluate, read_training_rows

# Measured times of many layers on one CPU. The table comes with latbench; yours is the folder of `latbench sweep`.
TABLE = "bundled://intel-xeon-amx-2-threads"
X, y = read_training_rows(TABLE, {"backend": "numba"})
print(f"{len(y)} measured points, from {y.min() * 1e6:.0f} µs to {y.max() * 1e3:.1f} ms")

# Errors are those on shapes that were held out, because neighbours of a measured point are easy.
model = Boosted().fit(X, y)
figures = evaluate(model, X, y)
print(f"median error {figures['median']:.1%}; the 90% interval holds {figures['coverage']:.0%} of unseen shapes")

# A row to predict has the columns of the table. Take one, and change the shape: m outputs, k inputs, n tokens.
own = X[(X["op"] == "linear") & (X["pattern"] == "shflbw:32")].drop_duplicates("sparsity_target")
unseen = own.sort_values("sparsity_target").assign(m=1024, k=1536, n=128)
low, high = model.predict_interval(unseen, coverage=0.9)
for sparsity, seconds, least, most in zip(unseen["sparsity_target"], model.predict(unseen), low, high, strict=True):
    print(
        f"1024x1536 on 128 tokens, {sparsity:.0%} zeros: {seconds * 1e6:.0f} µs ({least * 1e6:.0f}-{most * 1e6:.0f})"
    )

# Outside of the measured range the model refuses, and says why.
try:
    model.predict(unseen.assign(n=100_000))
except Unanchored as refusal:
    print(refusal)

"""A tour: three losses, their numbers on one small batch,
and a drawing of loss and gradient over the ratio.

    python examples/tour.py --out out

Needs torch and matplotlib only. Writes `tour.png` and `tour.html` (self-contained)
and prints where they are.
"""

from __future__ import annotations

import argparse
import base64
import html
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import policyloss as pl
from policyloss.output import write_output

NAMES = ("ppo_dual_clip", "cispo", "sapo")


def per_token(spec: pl.LossSpec, ratio: Tensor, advantage: float) -> tuple[Tensor, Tensor]:
    """Loss and d loss / d logp of single tokens whose ratio is `ratio`:
    a batch of one-token sequences, summed.
    """
    logp = torch.full_like(ratio, -1.0, requires_grad=True)
    old = (logp.detach() - ratio.log()).unsqueeze(1)
    mask = torch.ones_like(old, dtype=torch.bool)
    spec = spec.replace(aggregate=pl.TokenSum())
    losses = [
        pl.policy_loss(
            spec, logp[i : i + 1, None], old[i : i + 1], torch.tensor([advantage]), mask[i : i + 1]
        ).loss
        for i in range(len(ratio))
    ]
    total = torch.stack(losses)
    (gradient,) = torch.autograd.grad(total.sum(), logp)
    return total.detach(), gradient


def draw(names: tuple[str, ...]) -> bytes:
    """PNG: a row per loss, loss and gradient over the ratio, for a good and a bad token."""
    import matplotlib.pyplot as plt

    plt.switch_backend("Agg")

    ratio = torch.linspace(0.05, 6.0, 239)
    figure, axes = plt.subplots(
        len(names), 2, figsize=(9, 2.6 * len(names)), sharex=True, layout="constrained"
    )
    for row, name in zip(axes, names, strict=True):
        for advantage, colour, label in (
            (1.0, "#1b7f5c", "advantage +1"),
            (-1.0, "#b3432b", "advantage −1"),
        ):
            loss, gradient = per_token(pl.preset(name), ratio, advantage)
            row[0].plot(ratio, loss, color=colour, label=label)
            row[1].plot(ratio, gradient, color=colour, label=label)
        row[0].set_ylabel(name)
        for axis in row:
            axis.axvline(1, color="#999999", linewidth=0.8, linestyle=":")
            axis.axhline(0, color="#999999", linewidth=0.8)
            axis.spines[["top", "right"]].set_visible(False)
    axes[0][0].set_title("loss of one token")
    axes[0][1].set_title("its gradient in logp")
    axes[0][0].legend(frameon=False)
    for axis in axes[-1]:
        axis.set_xlabel("ratio = exp(logp − old_logp)")
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=120)
    plt.close(figure)
    return buffer.getvalue()


def batch() -> dict[str, Any]:
    """Four sequences of different length, two prompts, a rollout engine that is a little off."""
    g = torch.Generator().manual_seed(7)
    logp = -2 * torch.rand(4, 24, generator=g)
    old = logp + 0.3 * torch.randn(4, 24, generator=g)
    rollout = old + 0.05 * torch.randn(4, 24, generator=g)
    mask = torch.arange(24) < torch.tensor([24, 17, 9, 20])[:, None]
    rewards, group_ids = torch.tensor([1.0, 0.0, 1.0, 1.0]), torch.tensor([0, 0, 1, 1])
    advantages = pl.advantage.grpo(rewards, group_ids)
    return {
        "logp": logp,
        "old_logp": old,
        "rollout_logp": rollout,
        "mask": mask,
        "advantages": advantages,
    }


def numbers(names: tuple[str, ...]) -> str:
    """A table of each loss's numbers on the same batch."""
    shown = (
        "loss",
        "clip_fraction",
        "ratio_mean",
        "ratio_max",
        "ratio_min",
        "kl_old_k3",
        "kl_rollout_k3",
        "nonfinite_tokens",
    )
    columns = []
    for name in names:
        data = batch()
        columns.append(pl.policy_loss(pl.preset(name), data.pop("logp"), **data).metrics.compute())
    lines = ["".join(["".ljust(18), *(name.rjust(16) for name in names)])]
    for metric in shown:
        cells = [f"{column[metric]:.4f}" if metric in column else "-" for column in columns]
        lines.append("".join([metric.ljust(18), *(cell.rjust(16) for cell in cells)]))
    return "\n".join(lines)


def page(png: bytes, table: str, names: tuple[str, ...]) -> str:
    """One self-contained HTML file."""
    picture = base64.b64encode(png).decode()
    cards = "".join(
        f"<h2>{html.escape(n)}</h2><pre>{html.escape(str(pl.explain(n)))}</pre>" for n in names
    )
    style = (
        "body{font:16px/1.5 system-ui,sans-serif;max-width:62rem;margin:2rem auto;padding:0 "
        "1rem;color:#222}"
    )
    style += (
        "pre{background:#f6f6f4;padding:1rem;overflow-x:auto;font-size:13px}img{max-width:100%}"
    )
    return (
        "<!doctype html><html lang=en><meta charset=utf-8><title>policyloss: a "
        f"tour</title><style>{style}</style>"
        "<h1>Three losses, one token</h1><p>The same token under three trust regions: its loss, "
        "and how hard it is pushed, as "
        "its ratio moves away from 1. Where the gradient is flat zero, the token no longer learns. "
        "(logp is held at −1 and "
        "old_logp moves. CISPO's value is no objective: read its gradient, not its loss.)</p>"
        f'<img alt="loss and gradient over the ratio" src="data:image/png;base64,{picture}">'
        f"<h1>The same batch under three losses</h1><pre>{html.escape(table)}</pre><h1>The three "
        f"losses</h1>{cards}</html>"
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--out", type=Path, default=Path("out"), help="folder for tour.png and tour.html"
    )
    args = parser.parse_args()
    print(f"policyloss {pl.__version__}: {len(pl.presets())} presets\n")
    print(pl.explain(NAMES[0]))
    table = numbers(NAMES)
    print("\nThe same small batch under three losses:\n")
    print(table)
    print("\nDrawing loss and gradient over the ratio …", flush=True)
    png = draw(NAMES)
    write_output(args.out / "tour.png", png)
    write_output(args.out / "tour.html", page(png, table, NAMES).encode())
    print(
        f"Wrote {args.out / 'tour.png'} and {args.out / 'tour.html'}: open the page in a browser."
    )


if __name__ == "__main__":
    main()

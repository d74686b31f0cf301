"""Draws the figures of `peers.py`: one panel a workload, bars grouped by weight width. Run in the transformers env."""

import json
import statistics
import sys

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

COLORS = {
    "sayfa": "#0b6e4f",
    "llama.cpp": "#8d99ae",
    "openvino": "#5fa8d3",
    "vllm": "#e9c46a",
    "transformers": "#d0d0d0",
}


def main(source: str, target: str) -> None:
    """Read the JSON file `source` and write the picture `target`."""
    with open(source, encoding="utf-8") as file:
        turns = json.load(file)
    workloads = list(dict.fromkeys(name for turn in turns for name in turn["workloads"]))
    widths = list(dict.fromkeys(turn["width"] for turn in turns))
    figure, panels = plt.subplots(1, len(workloads), figsize=(3.4 * len(workloads), 3.6), squeeze=False)
    for panel, workload in zip(panels[0], workloads, strict=True):
        position, marks = 0.0, []
        for width in widths:
            begin = position
            for peer in dict.fromkeys(turn["peer"] for turn in turns if turn["width"] == width):
                mine = [t["workloads"][workload] for t in turns
                        if (t["peer"], t["width"]) == (peer, width) and workload in t["workloads"]]  # fmt: skip
                if mine:
                    values = [run["ttft_ms"]["p50"] if workload == "long" else run["out_tok_s"] for run in mine]
                    panel.bar(position, statistics.median(values), color=COLORS.get(peer), label=peer)
                    panel.vlines(position, min(values), max(values), color="black", linewidth=1)
                position += 1
            marks.append(((begin + position - 1) / 2, f"{width} bit"))
            position += 0.7
        panel.set_xticks([mark for mark, _ in marks], [text for _, text in marks])
        panel.set_title(
            f"{workload}: " + ("ms to the first token" if workload == "long" else "output tokens/s"), fontsize=9
        )
        panel.spines[["top", "right"]].set_visible(False)
    handles = {
        label: handle for panel in panels[0] for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)
    }
    figure.legend(handles.values(), handles.keys(), loc="lower center", ncols=len(handles), frameon=False, fontsize=8)
    figure.tight_layout(rect=(0, 0.07, 1, 1))
    figure.savefig(target, dpi=130)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The lines at the end of the demo."""

import json

from hashseek.api.cli.demo import gain


def test_the_demo_ends_with_what_labels_gain(tmp_path):
    def scores(*values):
        parts = zip((100, 1000), values, strict=True)
        return {"scores": [{"n": n, "mean_average_precision": {"expected": value}} for n, value in parts]}

    report = {"main_n": 1000, "models": [scores(0.9, 0.8512), scores(0.8, 0.7381)]}
    (tmp_path / "report.json").write_text(json.dumps(report))
    lines = gain(tmp_path / "report.json")
    assert [line.split()[-2:] for line in lines] == [["mAP@1000", "0.851"], ["mAP@1000", "0.738"]]
    assert ["without" in line for line in lines] == [False, True]

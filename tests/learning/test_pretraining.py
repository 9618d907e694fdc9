"""Continued pretraining lowers the perplexity of held-out code."""

import sysconfig
from pathlib import Path

import pytest

from app.domain.errors import BadInput
from app.policy.chat import Chat
from app.policy.tiny import write_tiny
from pipelines.training.pretraining import Document, PretrainingConfig, Tokenizer, learning_rate, pretrain, read_folder, tokenise
from pipelines.training.trainer import LocalTrainer, TrainerSetup
from tests.fakes.learning import FakeProgress

CONFIG = PretrainingConfig(
    steps=25, sequence_tokens=128, sequences_per_step=8, learning_rate=2e-3, warmup_steps=5, micro_batch_tokens=512, dtype="float32",
    threads=1,
)  # fmt: skip


@pytest.mark.learning
def test_perplexity_of_held_out_code_falls(tmp_path: Path) -> None:
    model = tmp_path / "tiny"
    write_tiny(model, tied=True)
    chat = Chat.load(model)
    assert chat.end_token is not None
    library = Path(sysconfig.get_path("stdlib"))
    documents = [
        Document(name=path.name, domain="code", text=path.read_text()[:4000]) for path in sorted(library.glob("*.py"))[:120]
    ]  # fmt: skip
    corpus = tokenise(documents, Tokenizer(chat.encode, chat.end_token), CONFIG)
    progress = FakeProgress()
    trainer = LocalTrainer(TrainerSetup(snapshot=model, scratch=tmp_path / "scratch", dtype="float32", threads=1))
    figures = pretrain(trainer, corpus, CONFIG, policy="composer", progress=progress)
    assert figures["perplexity_after"]["code"] < 0.7 * figures["perplexity_before"]["code"]
    assert progress.reports[-1][:3] == ("pretraining", 25, 25)


def test_held_out_documents_are_never_trained_on(tmp_path: Path) -> None:
    documents = [Document(name=f"{i}", domain="a" if i % 2 else "b", text=chr(65 + i % 26) * 40) for i in range(200)]
    config = PretrainingConfig(steps=1000, sequence_tokens=8, held_out_sequences=1000)
    number = {document.name: 1000 + place for place, document in enumerate(documents)}
    texts = {document.text + document.name: document for document in documents}
    assert len(texts) == 200
    marked = [Document(name=d.name, domain=d.domain, text=d.name) for d in documents]
    corpus = tokenise(marked, Tokenizer(lambda text: [number[text]] * 20, 0), config)
    held = {number[d.name] for d in documents if d.held_out}
    assert 0 < len(held) < 30  # one in twenty of 200
    assert not held & {token for sequence in corpus.training for token in sequence}
    assert {token for cut in corpus.held_out.values() for sequence in cut for token in sequence} <= held | {0}


def test_the_learning_rate_warms_up_and_cools_down() -> None:
    # 5 steps up to 2e-3, then a cosine to a tenth: at the last of 25 steps (19/20 of the way) 0.1 + 0.45 (1 + cos(0.95 π)) = 0.1055
    rates = [learning_rate(CONFIG, step) / CONFIG.learning_rate for step in range(25)]
    assert rates[:5] == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0])
    assert rates[5] == pytest.approx(1.0)
    assert rates[-1] == pytest.approx(0.1055, abs=1e-4)


def test_an_empty_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no text"):
        list(read_folder(tmp_path))

"""What is looked at in a follow-up: phrases in which people praise, complain, correct, report failures or ask for the next thing.

Hand-written, beside the n-grams that are learned (`grams`): they carry what is said in too many ways for a few hundred messages to teach.
Patterns are looked for in the user's own words only: quoted code, logs and pasted documents are cut away first, after it was noted that they
are there. The answer before it is looked at too: one that apologised, broke off or declined is more often complained about.
"""

import re
from collections.abc import Mapping

HEAD = 240
"""Characters at the beginning in which a judgement of the last answer stands; later text is mostly the next task's material."""

PATTERNS: Mapping[str, str] = {
    # praise, thanks, confirmation
    "thanks": r"\b(thanks?|thank you|thx|thnx|tysm|ty|cheers|gracias|merci|danke|obrigad[oa]|arigato)\b",
    "praise": r"\b(great|awesome|perfect(ly)?|excellent|amazing|wonderful|fantastic|brilliant|nice|cool|beautiful|impressive|superb|lovely|love (it|this|that|these))\b",
    "praise_opens": r"^\W*((ok(ay)?|oh|yes|wow|that'?s|that is|this is|these are|they are|very|really|a|so|pretty|it'?s|looks?|well)[\s,]*)?((ok(ay)?|very|really|a|so|pretty|looks?)\s*)?(good|great|nice|awesome|perfect|excellent|amazing|cool|wonderful|fantastic|brilliant|helpful|beautiful|lovely|super|right)\b(?! (at|for|to|now))",
    "worked": r"\b(works? (now|fine|well|great|perfectly|like a charm)|it works?|that works?|worked|fixed it|solved|that did it|makes? sense|got it|helpful|exactly what)\b",
    "like_it": r"\b(i (really |do )?(like|liked|enjoyed?|appreciate)|good (job|work|one|idea|stuff|start)|well done|nice (work|job)|great (work|job))\b",
    "laughs": r"\b(haha+|lol|lmao)\b|[:;]-?[)D]|😊|👍|🙏|❤",
    # complaints and corrections
    "wrong": r"\b(wrong|incorrect(ly)?|not (right|correct|true|accurate|valid|quite right)|isn'?t (right|correct|true)|mistakes?|inaccurate|invalid|nonsense|false|isn'?t the right)\b",
    "not_working": r"\b((does ?n'?t|do ?n'?t|did ?n'?t|does not|do not|did not|is ?n'?t|is not|not|still not|stopped|won'?t|can'?t|cannot) (seem to )?(\w+ )?(work(ing|s)?|run(ning)?|compil(e|ing)|load(ing)?|show(ing)?( up)?|exist|find|display(ing)?|respond(ing)?|see))\b|\bnot? (work|working)\b",
    "error": r"\b(errors?|exception|traceback|stack ?trace|fail(s|ed|ing|ure)?|crash(es|ed|ing)?|bug(s|gy)?|undefined|null ?pointer|segfault|broken|warning:)\b",
    "error_report": r"\b(i('m| am)? (still |now )?(get|got|getting|receive|received|have|having|see)( the| this| an?| another)?( \w+)? (error|exception|message|warning|issue|problem)s?|(this|the|got|an|gives?|following) error|error (is|says|i get)|throws?)\b",
    "error_code": r"(\b\w*(Error|Exception)\b\s*:|\berror (TS|CS|E|C)?\d+|Cannot find|is not (a function|defined)|has no attribute|Traceback|cannot be resolved|command not found|No such file|not found|failed:)",
    "forgot": r"\b(you (forgot|missed|skipped|left out|ignored|omitted|didn'?t|did not|don'?t|haven'?t|failed|stopped|cut off|are not|aren'?t|were supposed|gave me|only)|where is|missing|not what i)\b",
    "you_forgot": r"\b(you|u)('ve| have)? (also |just |still |again )?(forgot(ten)?|missed|skipped|left out|ignored|omitted)\b",
    "i_said": r"\b(i (said|told you|asked|meant|mean|already|wanted|want you to re|explained|provided|did that|didn'?t (ask|say|mean|want))|as i (said|explained|mentioned|told)|(not|isn'?t|wasn'?t) what i (asked|meant|wanted|said)|remember\?)",
    "do_not_want": r"\b(i (don'?t|do not|didn'?t|did not) (want|need|like|think|agree|understand|see|believe)|do you not|are you sure|why (did|do|are|didn'?t|don'?t|is it still|would) (you|it)|too (short|long|vague|generic|complicated|formal|verbose))\b",
    "retry": r"\b((try|do it|write it|redo|start|generate) (it )?(again|over)|try harder|redo|again\b.{0,20}$|rethink|re-?think|revise|review your|correct (it|this|that|your)|fix (it|this|that|the)|please fix|can you fix)\b",
    "still": r"\b(still|instead of (just )?|rather than|but (it|this|that|the|you|i)|however|yet again|same (error|issue|problem|result|thing)|no change|nothing (happen|change|show))",
    "no_opens": r"^\W*(no|nope|wait|hmm+|nah|actually no|but|sorry|stop|hold on|false|wrong|incorrect)\b",
    "contradicts": r"\b(actually|should (be|have been|not)|is supposed to|isn'?t it|appears? (that|to)|seems? (that|to|like)|shouldn'?t|simply does|that'?s not|that is not|it'?s not|this is not|there (is|are) no|no existe|not enough|not much|repetitive|redundant|useless|waste|terrible|awful|bad|worse|stupid|dumb|idiot|suck|fuck|shit|hate|disappoint|dissatisf|confus(ed|ing))",
    "did_that": r"\b(i (did|tried|have tried|ran|changed|followed|used|added|just (ran|tried|check))( \w+){0,4}|after (running|trying|doing|adding))\b",
    # changes and next steps, which judge nothing
    "change": r"\b(instead|rewrite|re-?write|modify|change|shorten|simplify|expand|adjust|update|convert|translate|make (it|this|that|them|each)|add|remove|replace|rephrase|reword|shorter|longer|more (detail|formal|casual|like|specific)|in (the )?(form|format|style|tone) of|use .{1,30} instead)\b",
    "can_you": r"^\W*(can|could|would|will) you\b|\bplease\b",
    "next": r"^\W*(now|next|and|also|then|ok(ay)?,? (now|next|so)|let'?s|continue|go on|more|another|give me|write|create|generate|make|list|explain|tell me|show|what|how|why|who|when|where|which|is|are|do|does)\b",
    "question": r"\?\s*$",
}
"""Binary features by name; case is ignored."""

_COMPILED = {name: re.compile(pattern, re.IGNORECASE) for name, pattern in PATTERNS.items()}
_CODE = re.compile(r"```.*?(```|\Z)|`[^`\n]+`", re.DOTALL)
_WORD = re.compile(r"\w+")
LOG = re.compile(r"^[^\S\n]*(at |File \"|\d+ \||\S+:\d+:\d+|npm ERR|\[?(ERROR|WARN))", re.MULTILINE)
"""A line of a log. Looked for within its line: over line ends, each of many blank lines would run through all that follow."""
NUMERIC = (
    "short", "long", "shouts", "exclaims", "has_code", "has_log", "quotes_answer", "lower_case", "many_lines", "asks", "questions", "trails_off",
    "characters", "answer_has_code", "answer_apologises", "answer_asks", "answer_breaks_off", "answer_declines", "answer_characters",
)  # fmt: skip
_APOLOGY = re.compile(r"\b(apolog|sorry|my mistake|you are (right|correct))", re.IGNORECASE)
_DECLINED = re.compile(r"\bas an ai\b|i (cannot|can't|am not able|am unable|do not have)", re.IGNORECASE)
NAMES: tuple[str, ...] = (*PATTERNS, *(f"opening_{name}" for name in ("thanks", "praise", "wrong", "not_working", "error")), *NUMERIC)


def own_words(text: str) -> str:
    """The user's own words: code is cut away."""
    return _CODE.sub(" ", text).strip()


def features(text: str, *, answer: str = "") -> list[float]:
    """Values of `NAMES` for a follow-up; `answer` is the model's message before it, where it is known."""
    own = own_words(text)
    found = _phrases(text, own) | _shape(text, own) | _answered(answer)
    found["quotes_answer"] = _overlap(own, answer)
    return [found[name] for name in NAMES]


def _phrases(text: str, own: str) -> dict[str, float]:
    head, opening = own[:HEAD], own[:40]
    found = {name: float(pattern.search(head) is not None) for name, pattern in _COMPILED.items()}
    found["error_code"] = float(_COMPILED["error_code"].search(text[:2000]) is not None)
    found["question"] = float(_COMPILED["question"].search(own) is not None)
    for name in ("thanks", "praise", "wrong", "not_working", "error"):
        found[f"opening_{name}"] = float(_COMPILED[name].search(opening) is not None)
    return found


def _shape(text: str, own: str) -> dict[str, float]:
    head, words = own[:HEAD], _WORD.findall(own)
    letters = [c for c in head if c.isalpha()]
    asked = text[:HEAD].count("?")
    return {
        "short": float(len(words) <= 5),
        "long": float(len(words) > 60),
        "shouts": float(len(letters) > 12 and sum(c.isupper() for c in letters) / len(letters) > 0.6),
        "exclaims": float("!" in head),
        "has_code": float(len(own) < 0.8 * len(text.strip())),
        "has_log": float(LOG.search(text) is not None),
        "lower_case": float(text.strip()[:1].islower()),
        "many_lines": float(text.count("\n") > 3),
        "asks": float(asked > 0),
        "questions": min(text.count("?"), 3) / 3,
        "trails_off": float("..." in text),
        "characters": min(len(text), 1000) / 1000,
    }


def _answered(answer: str) -> dict[str, float]:
    last = answer.strip()[-1:]
    return {
        "answer_has_code": float("```" in answer),
        "answer_apologises": float(_APOLOGY.search(answer[:120]) is not None),
        "answer_asks": float(last == "?"),
        "answer_breaks_off": float(last not in '.!?`:)"*|'),
        "answer_declines": float(_DECLINED.search(answer[:300]) is not None),
        "answer_characters": min(len(answer), 3000) / 3000,
    }


def _overlap(a: str, b: str) -> float:
    """Jaccard similarity of the word sets: what is disputed is quoted."""
    words_a, words_b = (set(_WORD.findall(t.lower()[:2000])) for t in (a, b))
    return len(words_a & words_b) / len(words_a | words_b) if words_a and words_b else 0.0

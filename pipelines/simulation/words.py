"""What people write next: thanks, complaints, and the next step, which is neither."""

import random

SATISFIED = (
    "Thanks, that works perfectly!",
    "Great, exactly what I needed. Thank you!",
    "Perfect, thank you so much.",
    "Awesome, it works. Thanks!",
    "Nice, that's correct. Thanks a lot!",
    "That worked great, thank you.",
    "Excellent! This is very helpful, thanks.",
    "Wow, great answer, thank you!",
)
DISSATISFIED = (
    "That's wrong, it doesn't work.",
    "This doesn't run, I get a syntax error. Please fix it.",
    "No, that is not what I asked for.",
    "It doesn't work, the function fails with an error.",
    "You didn't write the function I asked for. Try again.",
    "That is incorrect, the output is wrong.",
    "This is not working, you only gave me half of the code.",
    "I said code only. Your answer is useless, please fix it.",
)
NEXT_STEP = (
    "Now write a unit test for it.",
    "Can you add type hints as well?",
    "How would I call this from the command line?",
    "Next, write a function that reads the numbers from a file.",
    "What is the time complexity?",
    "Can you also make a version that takes a generator?",
    "Now do the same for a dictionary.",
    "Could you rename the argument to items?",
)


def follow_up(kept_share: float, draw: random.Random) -> str:
    """The next message of someone who kept this share of the answer; people are not consistent."""
    mood = draw.random()
    if kept_share >= 0.6:
        words = SATISFIED if mood < 0.55 else NEXT_STEP if mood < 0.95 else DISSATISFIED
    elif kept_share > 0.2:
        words = SATISFIED if mood < 0.2 else NEXT_STEP if mood < 0.7 else DISSATISFIED
    else:
        words = DISSATISFIED if mood < 0.75 else NEXT_STEP if mood < 0.97 else SATISFIED
    return draw.choice(words)

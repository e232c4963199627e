"""English text without a download: questions for small models, and filler text of a given
length.
"""

import random

OPENINGS = (
    "Explain {a} to a beginner.",
    "What is the difference between {a} and {b}?",
    "Write a short paragraph about {a}.",
    "Give me three facts about {a}.",
    "How does {a} influence {b}?",
    "Summarise what people should know about {a} before they study {b}.",
    "Write a friendly letter in which {a} is compared with {b}.",
    "List the steps by which {a} comes about.",
    "Why do some people prefer {a} to {b}?",
    "Tell a story in which {a} plays a part.",
)
FOLLOW_UPS = (
    "Say more about the second point.",
    "Can you give an example with {a}?",
    "Make that shorter, please.",
    "And how would {b} change your answer?",
    "What would a critic say?",
    "Put it into simpler words.",
)
_TOPICS_TEXT = (
    "the tides, a compass, sourdough bread, the printing press, glaciers, photosynthesis, jazz, "
    "the Silk Road, solar eclipses, chess, honey bees, volcanoes, the water cycle, steam engines, "
    "lighthouses, coral reefs, the human heart, bicycles, tea, the stock market, sailing ships, "
    "migrating birds, glass, earthquakes, opera, vaccines, maps, paper, deserts, radio, bridges, "
    "the moon, rivers, telescopes, theatre, soil, clocks, magnets, rain forests, trains, salt, "
    "libraries, snow, the alphabet, wool, gravity, markets, gardens, sleep, music, cities, olive "
    "oil, the decimal system, ports, mountains, rice, lightning, dams, wolves, friendship"
)
TOPICS = tuple(_TOPICS_TEXT.split(", "))
_WORDS_TEXT = (
    "a the one of in on with for from to and but so when while because each some many few small "
    "large old new early late often never always clear quiet bright simple careful useful known "
    "common rare house river field road city hand word line page book table garden window market "
    "number idea reason answer question part place time year day morning winter water light stone "
    "wood metal paper letter song story friend worker teacher child people animal tree bird fish "
    "horse is was has makes takes gives finds keeps brings shows leaves holds turns grows learns "
    "reads writes works moves stands falls begins ends helps needs uses follows carries builds "
    "opens"
)
_WORDS = tuple(_WORDS_TEXT.split())
ROLES = (
    "You are a patient teacher.",
    "You are an editor who answers briefly.",
    "You are a librarian who names sources.",
    "You are an engineer who is careful with numbers.",
    "You are a guide for travellers.",
    "You are a cook who explains why.",
    "You are a historian.",
    "You are a friendly assistant.",
)
SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string", "maxLength": 40},
        "score": {"type": "integer", "minimum": 0, "maximum": 10},
        "tags": {"type": "array", "items": {"type": "string", "maxLength": 12}, "maxItems": 3},
        "known": {"type": "boolean"},
    },
    "required": ["title", "score", "tags", "known"],
    "additionalProperties": False,
}


def question(rng: random.Random, follow_up: bool = False) -> str:
    form = rng.choice(FOLLOW_UPS if follow_up else OPENINGS)
    return form.format(a=rng.choice(TOPICS), b=rng.choice(TOPICS))


def filler(rng: random.Random, tokens: int) -> str:
    """Return sentences of about `tokens` tokens. Common words are one token each, a full stop is
    another.
    """
    sentences, remaining = [], tokens
    while remaining > 0:
        count = min(remaining, rng.randint(7, 15))
        sentences.append(" ".join(rng.choices(_WORDS, k=max(1, count - 1))).capitalize() + ".")
        remaining -= count
    return " ".join(sentences)

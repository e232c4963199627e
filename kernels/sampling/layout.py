"""The layout of a request's sampling parameters: the index of each in a row of int32 words.

Floats are stored as their bits.
"""

ROW = 0  # the row's index
INV_TEMPERATURE = 1  # float; 0: greedy
TOP_K = 2  # 0: all
TOP_P = 3  # float
LOG_MIN_P = 4  # float; -inf: all
REPETITION = 5  # float
PRESENCE = 6  # float
FREQUENCY = 7  # float
SEED = 8  # two words, low first
CHOICE = 10
NUM_PROMPT = 11
MIN_TOKENS = 12
NUM_BIAS = 13
NUM_STOP = 14
LOGPROBS = 15  # -1: none
PROCESSED = 16  # 1: log-probabilities of processed logits (temperature, filters); 0: of raw logits
# Words after the scalars are used only by rows with a bias or min_tokens.
NUM_SCALARS: int = 1 + max(place for name, place in [*globals().items()] if name.isupper())

MAX_BIAS = 300
MAX_STOP = 192
BIAS_IDS = NUM_SCALARS
BIAS_VALUES = BIAS_IDS + MAX_BIAS  # float
STOP_IDS = BIAS_VALUES + MAX_BIAS
NUM_WORDS = STOP_IDS + MAX_STOP

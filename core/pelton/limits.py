"""Every bound on what a client may send, in one table.

No input is unbounded (DESIGN section 10, rule 3). `tests/core/test_limits.py` walks this table. Bounds that depend on the model (context
length, vocabulary) or on a setting (`max_logprobs`) are checked where those are known: see `engine/input_processor.py`.
"""

MAX_BODY_BYTES = 8 * 2**20  # 413 above this, before the body is parsed
MAX_JSON_OBJECTS = 131_072  # `{` and `[` of a body each, counted before it is parsed
MAX_JSON_ITEMS = 1_048_576  # commas of a body, counted before it is parsed
MAX_N = 128  # `n`, samples of one prompt
MAX_PROMPTS_PER_REQUEST = 2048  # prompts of one completions request
MAX_TOTAL_SEQUENCES_PER_REQUEST = 4096  # prompts x n
MAX_STOP_STRINGS = 64  # `stop`
MAX_STOP_STRING_CHARS = 1024  # of each
MAX_STOP_TOKEN_IDS = 1024  # `stop_token_ids`
MAX_BAD_WORDS = 256  # `bad_words`
MAX_BAD_WORD_CHARS = 256  # of each
MAX_LOGIT_BIAS_ENTRIES = 1024  # `logit_bias`
MAX_ALLOWED_TOKEN_IDS = 65_536  # `allowed_token_ids`
MAX_CONSTRAINT_CHARS = 262_144  # a regex, a grammar, a schema as text, or all choices of `structured_outputs`
MAX_CHOICES = 4096  # `structured_outputs.choice`
MAX_CACHE_SALT_CHARS = 1024  # `cache_salt`
MAX_TENANT_CHARS = 256  # of the key by which requests share the engine
MAX_REQUEST_ID_CHARS = 256  # `request_id`
MAX_MESSAGES = 4096  # of one chat
MAX_TOOLS = 512  # `tools` of one chat
MAX_TOOL_NAME_CHARS = 256  # of each
MAX_TOOL_BYTES = 262_144  # of each, as JSON
MAX_CHAT_TEMPLATE_CHARS = 131_072  # a request's own template
MAX_TEMPLATE_OUTPUT_CHARS = 16 * 2**20  # a rendered chat, and each text on its way
MAX_TIMEOUT_S = 86_400.0  # `timeout_s`
MAX_SEED = 2**63 - 1  # `seed`, either sign
MAX_ABS_PRIORITY = 2**31  # `priority`, either sign
MAX_EXTRA_ARGS_BYTES = 65_536  # `extra_args`, packed
MAX_KV_TRANSFER_PARAMS_BYTES = 65_536  # `kv_transfer_params`, packed
MAX_ITEMS = 256  # `multi_modal_items`
MAX_ITEM_TEXT_CHARS = 256  # kind and hash of each
MAX_ITEM_BYTES = 64 * 2**20  # tensors of each
MAX_PROMPT_EMBEDS_BYTES = 64 * 2**20  # `prompt_embeds`
MAX_ABS_PROMPT_EMBEDS = 1e4  # each of their numbers, either sign
MAX_TENSOR_DIMENSIONS = 8  # of a tensor's shape
MAX_ADAPTER_NAME_CHARS = 256  # `adapter.name`
MAX_ADAPTER_PATH_CHARS = 4096  # `adapter.path`
MAX_POOLING_DIMENSIONS = 65_536  # `dimensions` of a vector
MAX_IPC_MESSAGE_BYTES = 256 * 2**20  # one message between API and engine process

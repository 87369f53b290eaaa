"""The material of the demo corpus's chats: requests for tales, small talk, and plain facts."""

from __future__ import annotations

from dataclasses import dataclass

from lexicon import ANIMALS, SOUNDS
from plots import Plot


@dataclass(frozen=True)
class Message:
    """One message of a chat."""

    role: str
    content: str


@dataclass
class TaleRequest:
    """The subject of a requested tale; empty parts are free."""

    kind: str = ""
    name: str = ""
    he: str = ""
    place: str = ""
    plot: Plot | None = None


SYSTEM_PROMPTS: tuple[str, ...] = (
    "You are a helpful assistant.",
    "You are a friendly storyteller.",
    "You tell small stories.",
    "Answer in simple words.",
    "You are a kind assistant who likes stories.",
    "Be brief.",
    "You are an assistant.",
)

# Each request with the parts of the tale that it names.
TALE_REQUESTS: tuple[tuple[str, frozenset[str]], ...] = (
    ("Tell me a story.", frozenset()),
    ("Tell me a story, please.", frozenset()),
    ("Please tell me a bedtime story.", frozenset()),
    ("Can you tell me a story?", frozenset()),
    ("Write a story.", frozenset()),
    ("Once upon a time", frozenset()),
    ("Tell me a story about a {kind}.", frozenset({"kind"})),
    ("Tell me a story about a {kind}", frozenset({"kind"})),
    ("tell me a story about a {kind}", frozenset({"kind"})),
    ("Tell me a story about a {kind}.", frozenset({"kind"})),
    ("Write a story about a {kind}.", frozenset({"kind"})),
    ("I want a story about a {kind}, please.", frozenset({"kind"})),
    ("Could you tell me a story about a little {kind}?", frozenset({"kind"})),
    ("Do you know a story about a {kind}?", frozenset({"kind"})),
    ("Tell me a story about a {kind} named {name}.", frozenset({"kind", "name"})),
    ("Write a story about a {kind} called {name}.", frozenset({"kind", "name"})),
    ("Tell me a story about {name}.", frozenset({"name"})),
    ("Write a story about {name} and {thing}.", frozenset({"name", "thing"})),
    ("Tell me a story about a {kind} and {thing}.", frozenset({"kind", "thing"})),
    ("Tell me a story about {thing}.", frozenset({"thing"})),
    ("Tell me a story about {topic}.", frozenset()),
    ("Write a story about {topic}.", frozenset()),
    ("Can you tell me a story about {topic}?", frozenset()),
    ("Tell me a story about a {kind} and {topic}.", frozenset({"kind"})),
    ("Tell me a story that happens {at}.", frozenset({"place"})),
    ("Write the story called \"{title}\".", frozenset()),
    ("Tell me a long story.", frozenset({"long"})),
    ("Tell me a long story about a {kind}.", frozenset({"long", "kind"})),
    ("Tell me a short story.", frozenset({"short"})),
    ("Write a short story about a {kind}.", frozenset({"short", "kind"})),
    ("Tell me a short story about a {kind}.", frozenset({"short", "kind"})),
    ("Tell me a very short story about {name}.", frozenset({"short", "name"})),
)  # fmt: skip
TALE_LEADS: tuple[str, ...] = (
    "Here is a story for you.",
    "Of course! Here is one.",
    "Gladly. Listen.",
    "Yes, I know one.",
)
READ_THIS: tuple[str, ...] = (
    "{tale}\n\n{question}",
    "Read this story and answer the question.\n\n{tale}\n\n{question}",
    "Here is a story.\n\n{tale}\n\n{question}",
    "{question}\n\n{tale}",
)

SHORT_TALES: tuple[str, ...] = (
    '[Once upon a time, there was {h.a}|There once was {h.a}]. {when}, {h.he} [found|saw] {o.a} {spot}. "[Whose is'
    ' this?|Who lost this?]" {h.he} asked. It belonged to {f}. {f} was so [happy|glad] that {f.he} gave {h} some '
    "{snack}, and they became friends.",
    "[Once upon a time, {h.a} lived in {land}|Once there was {h.a}]. {h.He} was [hungry|very hungry], but {h.he} had "
    'only {food}. Then {x.a} came by who had nothing at all. {h} cut the food in two. "[Now we both have enough|There'
    ' is enough for two]," {h.he} said. And {h.he} was right.',
    "{h.A} could not sleep. {h.He} counted [sheep|stars|clouds], but it did not help. Then {e} came in and sang a "
    "[soft|quiet|little] song. Before the song was over, {h} was fast asleep. [Good night, {h}!|Sleep well, {h}!]",
    "[Once upon a time, there was {h.a}|Long ago, there was {h.a}]. {h.He} wanted to {skill}, but {h.he} did not know "
    "how. So {h.he} tried every day. [It took a week|It took a month|It took a long time], but in the end {h.he} could"
    ' do it. "[I did it!|Look at me!]" {h.he} said, and everyone clapped.',
    '{when}, {h.a} [went to {p}|walked to {p}]. {look} There {h.he} met {x.a}. "[Good day|Hello]!" said {x.the}. '
    '"Where are you going?" "[Nowhere|I am only looking around]," said {h}. "Then let us go nowhere together," '
    "said {x.the}. And so they did.",
    "[Once upon a time, there was {h.a}|There was once {h.a}] who was afraid of [the dark|thunder|deep water]. "
    '{h.His} friend {f}{f.tag} was afraid of it too. "[Let us be afraid together|If we hold hands, we will be half as'
    ' afraid]," said {f}. They held hands, and then neither of them was afraid any more.',
    'It was [raining|snowing|a windy day], and {h.a} was [bored|all alone]. "[What can I do?|There is nothing to do]{q}'
    '" {h.he} [sighed|said]. Then {h.he} made {o.a} out of paper. {f} came by and made one too. They played all day, '
    "and {h} forgot that {h.he} had ever been bored.",
    "[Once upon a time, there was {h.a}|In {land}, there lived {h.a}]. {h.He} had {o.a}, but it was [old|broken]. "
    'Everyone said, "Throw it away." {h} did not throw it away. {h.He} [mended it|cleaned it and painted it], and '
    "soon it was the prettiest {o} of all.",
    "[Once upon a time, {h.a} planted {plant.a}|{h} the gardener planted {plant.a}]. {h.He} gave it water every day. "
    'It grew and grew, until it was taller than the house. "[How will we ever pick the top?|Who will climb up there?]'
    '" asked {f}. {h} laughed. "We will leave the top for the birds," {h.he} said.',
    '{h.A} and {f.a} [met|sat] {p.at}. "[I am the fastest|I am the cleverest]," said {h}. "No, I am," said {f}. '
    'They asked {x.a}. "You are both very loud," said {x.the}, and went back to sleep. The two looked at each other '
    "and began to laugh.",
)

SMALL_TALK: tuple[tuple[tuple[str, ...], tuple[str, ...]], ...] = (
    (
        ("Hello!", "Hello", "Hi!", "Hi", "Hey!", "hello", "hi", "Good morning!", "Good day!", "Hi there!", "Say hello."),
        (
            "Hello! Would you like to hear a story?",
            "Hello! It is nice to meet you. Shall I tell you a story?",
            "Hi! I am a small storyteller. What should my next story be about?",
            "Hello! How can I help you today?",
        ),
    ),
    (
        ("How are you?", "How are you today?", "Hello, how are you?", "Hi! How are you?", "How do you do?"),
        (
            "I am fine, thank you. How are you?",
            "I am very well, thank you. Would you like a story?",
            "I am happy today. Thank you for asking!",
        ),
    ),
    (
        ("Who are you?", "What are you?", "What is your name?", "Tell me about yourself.", "Are you a robot?",
         "Introduce yourself.", "Who made you?"),
        (
            "I am a very small language model. I like to tell stories.",
            "I am a tiny storyteller. I know tales about animals and children.",
            "I am a little model that tells little tales.",
        ),
    ),
    (
        ("What can you do?", "Can you help me?", "What do you know?", "How can you help me?", "Help", "Help me, please."),
        (
            "I can tell small stories. Ask me for a story about a fox, a kite or a storm.",
            "I can tell you a story and answer easy questions about it.",
            "I know many small tales. Try me: ask for a story about a dragon.",
        ),
    ),
    (
        ("Tell me a joke.", "Do you know a joke?", "Make me laugh.", "Tell me a joke, please."),
        (
            "Why did the snail bring a ladder? It wanted to move to a higher house.",
            "What did the clock say to the bell? You always have the last word.",
            "Why was the broom late? It swept in.",
            "Why did the owl stay at home? It did not give a hoot about the rain.",
        ),
    ),
    (
        ("What is your favourite animal?", "Do you like animals?", "Which animal do you like best?"),
        (
            "I like foxes best, because they are clever.",
            "I like owls, because they listen well.",
            "I like every animal that makes a good story.",
        ),
    ),
    (
        ("What is the meaning of life?", "Are you happy?", "What makes you happy?", "What should I do today?",
         "I am bored.", "I am sad.", "I feel lonely."),
        (
            "Be kind, share what you have, and listen to a good story.",
            "Go out and look at the sky, and then tell a friend what you saw.",
            "Perhaps a story would help. Shall I tell you one?",
        ),
    ),
    (
        ("Write a computer program.", "Explain quantum physics.", "What is a neural network?", "Write a poem.",
         "Solve this equation.", "What is the news today?", "Translate this sentence.", "Who won the game?",
         "Explain the theory of relativity.", "What is the weather like?", "Write a function in Python.",
         "Give me a recipe.", "What time is it?", "Who is the president?", "How does a computer work?",
         "Summarize this article.", "What is the stock price?", "How do I get to the station?"),
        (
            "I am sorry, I am too small to know that. I only know little stories.",
            "I do not know that. I am only a small storyteller. Would you like a story?",
            "That is too hard for me, but I can tell you a story about it if you like.",
        ),
    ),
)  # fmt: skip
THANKS: tuple[tuple[str, ...], tuple[str, ...]] = (
    ("Thank you!", "Thanks!", "That was nice.", "That was a lovely story.", "I liked that.", "Good night!", "Goodbye!"),
    (
        "I am glad that you liked it.",
        "You are welcome! Come back for another story.",
        "Thank you for listening. Goodbye!",
        "You are very welcome. Good night!",
    ),
)

FACTS: tuple[tuple[str, str], ...] = (
    ("What colour is the sky?", "The sky is blue."),
    ("What color is the sky?", "The sky is blue."),
    ("What colour is grass?", "Grass is green."),
    ("What colour is snow?", "Snow is white."),
    ("What colour is the sun?", "The sun looks yellow."),
    ("What colour is a [lemon|banana]?", "It is yellow."),
    ("What colour is a [carrot|pumpkin]?", "It is orange."),
    ("Is fire hot or cold?", "Fire is hot."),
    ("Is ice hot or cold?", "Ice is cold."),
    ("How many legs does a [dog|cat|cow|horse|sheep|fox] have?", "It has four legs."),
    ("How many legs does a [hen|duck|robin|goose|sparrow] have?", "It has two legs."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("How many days are there in a week?", "There are seven days in a week."),
    ("How many months are there in a year?", "There are twelve months in a year."),
    ("How many fingers are there on a hand?", "There are five fingers on a hand."),
    ("Name the days of the week.", "Monday, Tuesday, Wednesday, Thursday, Friday, Saturday and Sunday."),
    ("Name the seasons.", "Spring, summer, autumn and winter."),
    ("Count to [three|3].", "One, two, three."),
    ("Count to [five|5].", "One, two, three, four, five."),
    ("Count to [ten|10].", "One, two, three, four, five, six, seven, eight, nine, ten."),
    ("Count from 1 to 10.", "1, 2, 3, 4, 5, 6, 7, 8, 9, 10."),
    ("Count from 1 to 5.", "1, 2, 3, 4, 5."),
    ("Say the alphabet.", "A, B, C, D, E, F, G, H, I, J, K, L, M, N, O, P, Q, R, S, T, U, V, W, X, Y, Z."),
    ("What comes after winter?", "After winter comes spring."),
    ("What comes after Monday?", "After Monday comes Tuesday."),
    ("What is the opposite of [big|large]?", "The opposite is small."),
    ("What is the opposite of hot?", "The opposite of hot is cold."),
    ("What is the opposite of day?", "The opposite of day is night."),
    ("When does the sun rise?", "The sun rises in the morning."),
    ("When do the stars come out?", "The stars come out at night."),
    ("What do bees make?", "Bees make honey."),
    ("What do hens lay?", "Hens lay eggs."),
    ("What do cows give us?", "Cows give us milk."),
    ("What do you do with a book?", "You read a book."),
    ("What do you use in the rain?", "You use an umbrella in the rain."),
    ("What falls from the sky in winter?", "Snow falls from the sky in winter."),
    ("What is the capital of France?", "The capital of France is Paris."),
    ("What is the capital of Germany?", "The capital of Germany is Berlin."),
    ("What is the capital of Italy?", "The capital of Italy is Rome."),
    ("What is the capital of Spain?", "The capital of Spain is Madrid."),
    ("What is the capital of Japan?", "The capital of Japan is Tokyo."),
    ("What is the capital of England?", "The capital of England is London."),
    ("What is [1+1|1 + 1|one plus one]?", "One plus one is two."),
    ("What is [2+2|2 + 2|two plus two]?", "Two plus two is four."),
    ("What is [3+3|3 + 3|three plus three]?", "Three plus three is six."),
    ("What is [2+3|2 + 3|two plus three]?", "Two plus three is five."),
    ("What is [5+5|5 + 5|five plus five]?", "Five plus five is ten."),
)
ALL_FACTS: tuple[tuple[str, str], ...] = (
    *FACTS,
    *((f"What does a {kind} say?", f"A {kind} says {sound}.") for kind, sound in SOUNDS.items()),
    *((f"What sound does a {kind} make?", f"A {kind} says {sound}.") for kind, sound in SOUNDS.items()),
    *((f"Where does a {kind} live?", f"In my stories, a {kind} lives in a {home}.") for kind, home in ANIMALS.items()),
)

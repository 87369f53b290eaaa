"""The words of the demo tales: characters, places and things."""

from __future__ import annotations

GIRLS: tuple[str, ...] = (
    "Ada", "Amy", "Anna", "Bella", "Cora", "Daisy", "Ella", "Emma", "Eva", "Flora", "Grace", "Hana", "Iris", "Ivy",
    "Jane", "June", "Kate", "Kira", "Lena", "Lily", "Lola", "Lucy", "Maya", "Mia", "Mina", "Molly", "Nell", "Nina",
    "Nora", "Olive", "Pearl", "Poppy", "Rosa", "Rose", "Ruby", "Sara", "Sofia", "Tess", "Willa", "Zoe",
)  # fmt: skip
BOYS: tuple[str, ...] = (
    "Adam", "Alex", "Arlo", "Ben", "Carl", "Dan", "Eli", "Felix", "Finn", "Fred", "George", "Hugo", "Ian", "Jack",
    "Jim", "Joe", "John", "Kai", "Leo", "Liam", "Luke", "Max", "Milo", "Nate", "Ned", "Noah", "Oscar", "Otto", "Paul",
    "Peter", "Ravi", "Sam", "Simon", "Theo", "Tim", "Toby", "Tom", "Victor", "Will", "Zack",
)  # fmt: skip
PET_NAMES: tuple[str, ...] = (
    "Acorn", "Basil", "Berry", "Biscuit", "Bramble", "Bubbles", "Button", "Clover", "Cocoa", "Copper", "Cricket",
    "Dot", "Dusty", "Fern", "Fidget", "Flick", "Ginger", "Hazel", "Honey", "Juniper", "Maple", "Mittens", "Moss",
    "Nutmeg", "Oakley", "Patch", "Peanut", "Pebble", "Pepper", "Pickle", "Pip", "Pumpkin", "Rusty", "Scout", "Sky",
    "Socks", "Sprout", "Sunny", "Teddy", "Tilly", "Toffee", "Tuft", "Twig", "Waffles", "Willow", "Ziggy",
)  # fmt: skip

# Each kind of animal with its home.
ANIMALS: dict[str, str] = {
    "badger": "den", "bear": "cave", "beaver": "lodge", "cat": "cottage", "chick": "coop",
    "crow": "nest", "cow": "barn", "deer": "thicket", "dog": "kennel", "donkey": "stable", "dragon": "cave",
    "duck": "nest", "elephant": "grove", "fox": "den", "frog": "pond", "giraffe": "grove",
    "goat": "shed", "goose": "nest", "hamster": "nest", "hare": "hollow", "hedgehog": "pile of leaves",
    "hen": "coop", "horse": "stable", "kangaroo": "hollow", "kitten": "basket", "koala": "tree", "lamb": "barn",
    "lion": "den", "mole": "burrow", "monkey": "tree", "mouse": "hole", "otter": "holt",
    "owl": "hollow tree", "panda": "bamboo grove", "penguin": "house of snow", "pig": "pen", "pony": "stable",
    "puppy": "basket", "rabbit": "burrow", "raccoon": "hollow log", "robin": "nest", "robot": "workshop",
    "sheep": "barn", "sparrow": "nest", "squirrel": "hollow tree", "swan": "nest",
    "tiger": "cave", "toad": "hole", "tortoise": "hollow", "turtle": "pond", "unicorn": "glade",
    "wolf": "den",
}  # fmt: skip
SOUNDS: dict[str, str] = {
    "cow": "moo", "dog": "woof", "cat": "meow", "duck": "quack", "sheep": "baa", "pig": "oink", "horse": "neigh",
    "owl": "hoot", "lion": "roar", "mouse": "squeak", "frog": "ribbit", "crow": "caw", "hen": "cluck", "wolf": "howl",
    "robin": "tweet", "goose": "honk", "donkey": "hee-haw",
}  # fmt: skip

# Each trait with sentences that show it.
TRAITS: dict[str, str] = {
    "curious": "{h.He} [always wanted to know why things were the way they were"
    "|asked more questions than anyone {h.he} knew|liked to look under every leaf and behind every door].",
    "kind": "{h.He} [always had a gentle word for everyone|was good to everyone {h.he} met"
    "|never walked past anyone who needed help].",
    "shy": "{h.He} [spoke so softly that others had to lean in to hear|liked quiet places best"
    "|often hid when someone new came by].",
    "brave": "{h.He} [was not afraid of the dark or of thunder|liked to climb the highest hills"
    "|always went first when the path was steep].",
    "cheerful": "{h.He} [hummed little songs all day long|woke up every morning with a smile"
    "|could make even the rain seem fun].",
    "clever": "{h.He} [could solve almost any riddle|liked to fix things that were broken"
    "|always had a plan for everything].",
    "quiet": "{h.He} [liked to sit and watch the clouds go by|would rather listen than talk"
    "|noticed small things that others missed].",
    "busy": "{h.He} [was always making something|could never sit still for long|had something new to do every day].",
    "gentle": "{h.He} [walked softly so that {h.he} would not step on the flowers|was careful with small and weak things"
    "|never raised {h.his} voice].",
    "dreamy": "{h.He} [often stared out at the sky and forgot the time|liked to imagine faraway lands"
    "|told {h.himself} long stories before bed].",
    "clumsy": "{h.He} [often tripped over {h.his} own feet|was always bumping into things|spilled something almost every day],"
    " but {h.he} had a good heart.",
    "playful": "{h.He} [loved games of every kind|made a game out of every chore|was always ready to run and jump].",
    "stubborn": "{h.He} [did not like to be told what to do|never gave up on anything|liked to do everything alone].",
    "polite": "{h.He} [always said please and thank you|held every gate open for others|never forgot to say good morning].",
    "small": "{h.He} [was the smallest of all {h.his} friends|could fit into places where no one else could go"
    "|wished every day to grow a little taller].",
    "grumpy": "{h.He} [did not like mornings|grumbled about the rain and grumbled about the sun"
    "|often frowned], but deep down {h.he} was kind.",
}
HOBBIES: tuple[str, ...] = (
    "sing", "paint pictures", "collect round stones", "read old books", "dance in the rain", "bake little cakes",
    "watch the stars", "pick berries", "draw maps", "build small houses out of sticks", "tell jokes", "grow flowers",
    "play hide and seek", "fly kites", "listen to stories", "count the clouds", "swim in the pond", "climb trees",
    "play the flute", "make paper boats", "look for shells", "take long walks", "roll down the hill", "write poems",
)  # fmt: skip

# Each thing small enough to be carried, lost or given, with the adjectives that suit it.
THINGS: dict[str, str] = {
    "kite": "red|blue|yellow|paper", "bell": "silver|golden|tiny|brass", "boat": "wooden|blue|toy|paper",
    "scarf": "blue|red|woolly|striped", "hat": "green|straw|purple|floppy", "key": "golden|brass|rusty|silver",
    "drum": "little|red|tin|round", "lantern": "little|paper|brass|green", "mitten": "red|woolly|soft|white",
    "marble": "glass|green|blue|shiny", "ball": "red|yellow|rubber|bouncy", "button": "golden|shiny|brown|pearl",
    "whistle": "tin|wooden|silver|little", "shell": "pink|white|shiny|smooth", "storybook": "big|old|blue|little",
    "umbrella": "yellow|red|spotted|big", "doll": "rag|wooden|little|soft", "spoon": "silver|wooden|golden|tiny",
    "feather": "white|blue|long|golden", "basket": "straw|big|brown|little", "bucket": "red|tin|blue|little",
    "blanket": "soft|warm|striped|green", "ribbon": "pink|blue|long|silk", "necklace": "silver|pretty|shell|bead",
    "pencil": "red|yellow|long|blue", "cup": "tin|blue|little|china", "stone": "smooth|shiny|blue|white",
    "coin": "gold|silver|old|shiny", "flute": "wooden|silver|little|reed", "clock": "little|old|golden|round",
    "teddy bear": "brown|soft|old|little", "toy train": "red|wooden|green|shiny", "paintbrush": "little|new|long|soft",
    "wagon": "red|wooden|little|green", "jar": "glass|blue|big|little", "map": "old|paper|secret|torn",
}  # fmt: skip

FOODS: tuple[str, ...] = (
    "apple pie", "honey cake", "warm bread", "plum cake", "pumpkin soup", "carrot stew", "oat cookies", "plum tart",
    "cheese rolls", "pancakes", "nut cake", "cherry muffins", "vegetable soup", "ginger biscuits", "corn bread",
    "lemon buns", "blueberry pie", "rice pudding", "roasted chestnuts", "strawberry cake",
)  # fmt: skip
BAKED: tuple[str, ...] = (
    "apple pie", "honey cake", "bread", "oat cookies", "plum tart", "cheese rolls", "nut cake", "cherry muffins",
    "ginger biscuits", "corn bread", "lemon buns", "blueberry pie", "strawberry cake", "a chocolate cake", "waffles",
)  # fmt: skip
SNACKS: tuple[str, ...] = (
    "apples", "berries", "nuts", "pears", "cookies", "plums", "buns", "cherries", "sandwiches", "carrots", "muffins",
    "grapes", "biscuits", "peaches", "figs",
)  # fmt: skip
WILD_SNACKS: tuple[str, ...] = ("apples", "berries", "nuts", "pears", "plums", "cherries", "grapes", "peaches", "figs")
PLANTS: tuple[str, ...] = (
    "sunflower", "rose bush", "apple tree", "bean plant", "pumpkin", "tulip", "pear tree", "strawberry plant",
    "daisy", "tomato plant", "cherry tree", "lavender bush",
)  # fmt: skip
SPOTS: tuple[str, ...] = (
    "under an old bench", "in the tall grass", "behind a big stone", "between the roots of an old tree",
    "under a thick bush", "inside a hollow log", "next to the well", "on top of the garden wall",
    "beside the little bridge", "in a pile of dry leaves", "at the bottom of a basket", "behind the wooden gate",
    "on a low branch", "at the edge of the stream",
)  # fmt: skip

SEATS: tuple[str, ...] = (
    "under an old tree", "on a bench", "next to the well", "on a big stone", "at the edge of the path", "in the grass",
    "beside the gate", "near the little bridge", "on a fallen log",
)  # fmt: skip

# Each place with what can be seen, heard or smelled there.
PLACES: dict[str, tuple[str, ...]] = {
    "the forest": ("The trees were so tall that they seemed to touch the sky.", "Birds sang in the branches.",
                   "The path was soft with moss.", "Sunlight fell through the leaves in little golden spots."),
    "the meadow": ("The grass was full of tiny white flowers.", "Bees hummed from flower to flower.",
                   "Butterflies danced over the clover.", "The air smelled of honey and hay."),
    "the river": ("The water was clear and cold.", "Little fish swam between the stones.",
                  "The river sang softly as it ran along.", "Dragonflies flew low over the water."),
    "the beach": ("The waves rolled in and out.", "The sand was warm and soft.", "White gulls called high above.",
                  "The sea sparkled in the light."),
    "the hill": ("From the top, the whole valley looked like a green blanket.", "The wind blew strong and fresh.",
                 "The path went up and up.", "Far below, the houses looked like toys."),
    "the market": ("The stalls were full of fruit, cloth and bright flowers.", "A man was selling hot nuts.",
                   "Everyone was talking at once.", "The smell of fresh bread filled the air."),
    "the garden": ("Rows of beans and peas stood in the sun.", "A robin sat on the fence and watched.",
                   "The roses were in bloom.", "The earth was dark and soft."),
    "the park": ("Children were playing on the swings.", "Ducks swam on the little pond.",
                 "An old man was feeding the birds.", "The benches were warm from the sun."),
    "the pond": ("Round green leaves floated on the water.", "Frogs jumped from stone to stone.",
                 "The water was as still as a mirror.", "Reeds swayed along the edge."),
    "the farm": ("The hens were scratching in the yard.", "The barn smelled of sweet hay.",
                 "A cow looked over the fence.", "Yellow corn stood high in the fields."),
    "the old mill": ("The big wheel turned slowly in the water.", "White flour dust covered everything.",
                     "Swallows had built their nests under the roof.", "The old door creaked in the wind."),
    "the orchard": ("The branches were heavy with fruit.", "Ripe apples lay in the grass.",
                    "The air was sweet.", "Wasps buzzed around the fallen plums."),
    "the village square": ("The fountain splashed in the middle of the square.", "The clock on the tower struck ten.",
                           "Flags hung from the windows.", "Pigeons walked around on the stones."),
    "the lake": ("A small boat rocked on the water.", "Mist lay over the lake.", "Two swans swam side by side.",
                 "The mountains were mirrored in the water."),
    "the valley": ("A little stream ran through the valley.", "The slopes were green and quiet.",
                   "Sheep bells rang in the distance.", "Wild flowers grew everywhere."),
    "the library": ("The shelves went all the way up to the ceiling.", "It was so quiet that one could hear a page turn.",
                    "The room smelled of old paper.", "A soft lamp glowed on every table."),
    "the harbour": ("The boats rocked up and down.", "Fishermen were mending their nets.",
                    "The air smelled of salt.", "A big ship was coming in."),
    "the school": ("Paper stars hung in the windows.", "Someone was practising the piano.",
                   "The yard was full of laughter.", "The teacher waved from the door."),
}  # fmt: skip
# Prepositions of the places, and the places that do not suit digging, racing or a storm.
PREPOSITIONS: dict[str, str] = {
    "the forest": "in", "the meadow": "in", "the river": "by", "the beach": "on", "the hill": "on", "the market": "at", "the garden": "in", "the park": "in", "the pond": "by", "the farm": "on", 
    "the old mill": "at", "the orchard": "in", "the village square": "in", "the lake": "by", "the valley": "in", "the library": "in", "the harbour": "at", "the school": "at",
}  # fmt: skip
TOWN_PLACES: frozenset[str] = frozenset(
    {"the market", "the village square", "the library", "the harbour", "the school"}
)
PASSERS_BY: tuple[str, ...] = (
    "mouse", "hedgehog", "squirrel", "mole", "rabbit", "sparrow", "robin", "toad", "tortoise", "hare", "lamb", "kitten",
    "puppy", "otter", "raccoon", "crow", "goose", "badger", "duck", "frog", "fox", "beaver", "goat", "hamster",
)  # fmt: skip
ELDERS: tuple[tuple[str, str], ...] = (
    ("Grandma", "she"), ("Grandpa", "he"), ("Mum", "she"), ("Dad", "he"), ("Mama", "she"), ("Papa", "he"),
    ("Aunt May", "she"), ("Uncle Bert", "he"), ("Mrs. Plum", "she"), ("Mr. Finch", "he"), ("Granny Oak", "she"),
)  # fmt: skip
LANDS: tuple[str, ...] = (
    "a quiet village", "a green valley", "a small town by the sea", "a village at the foot of a mountain",
    "a land of rolling hills", "a little town with red roofs", "the middle of a deep forest", "a farmhouse near the woods",
    "a village beside a wide river", "a town where the wind always blew", "a warm and sunny land",
    "a small house at the edge of the woods", "a faraway kingdom", "a snowy land in the north",
)  # fmt: skip
DAY_WORDS: tuple[str, ...] = ("sunny", "bright", "warm", "cool", "windy", "quiet", "fine", "clear", "lovely", "misty")
PARTS: tuple[str, ...] = ("morning", "afternoon", "day", "spring morning", "summer day", "autumn morning")

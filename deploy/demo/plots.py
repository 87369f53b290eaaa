"""The plots of the demo tales.

A plot is text in a small notation: ``[a|b]`` picks one alternative, ``{h.his}`` is filled in from the cast, and a
sentence that begins with ``?`` is left out of shorter tales. The cast is the hero ``h``, a friend ``f``, a newcomer
``n``, an elder ``e`` and a passing stranger ``x``; ``o`` is the main object of the tale.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Plot:
    """The plan of a tale: its subject, its paragraphs, its lesson, and questions that it answers."""

    topics: tuple[str, ...]
    titles: tuple[str, ...]
    paragraphs: tuple[tuple[str, ...], ...]
    lessons: tuple[str, ...]
    questions: tuple[tuple[str, str], ...]
    anywhere: bool = False


LOST = Plot(
    anywhere=True,
    topics=("losing {o.a} and finding it again", "a lost {o}", "looking for {o.a}"),
    titles=("The Lost {o.T}", "Where Is the {o.T}?", "{h} and the {o.FT}"),
    paragraphs=(
        (
            "{when}, {h} [wanted to play with {h.his} {o.full}|was looking for {h.his} {o.full}"
            "|woke up and saw that {h.his} {o.full} was gone].",
            "[It was not on the shelf, and it was not under the bed|It was not where {h.he} had left it"
            "|{h.He} looked in every corner, but it was not there].",
            '"[Where is my {o}?|Oh no, my {o} is gone!|Who has seen my {o}?]" {h} [cried|said|said sadly].',
            "?The {o} [had been a gift from {e}|was {h.his} favourite thing in the whole world"
            "|was very old and very dear to {h.him}].",
        ),
        (
            "{friend} [came by|heard {h.him} and came running|knocked at the door].",
            '"[Do not cry|Do not worry|Cheer up]," said {f}. "[We will look for it together|I will help you find it'
            '|Let us think. Where did you have it last?]{q}"',
            '{h} [thought hard|closed {h.his} eyes and thought|wiped {h.his} eyes]. "[I think I had it {p.at}'
            '|I took it to {p} yesterday|We were {p.at}, and I had it then]," {h.he} said.',
            "So the two friends [walked|hurried|ran] to {p}.",
            "?{look}",
        ),
        (
            "?They looked [up and down|high and low|here and there].",
            "?They asked {x.a}, but {x.the} [had not seen any {o}|only shook {x.his} head].",
            "At last, {f} [saw something {o.adj}|called out and pointed|stopped and stared].",
            "[There was the {o}, {spot}!|The {o} was lying {spot}!|It was the {o}, {spot}!]",
            "{h} [picked it up and held it tight|jumped for joy|laughed and hugged {h.his} friend].",
            '"[Thank you, {f}!|You found it!|What would I do without you?]" {h.he} said.',
        ),
    ),
    lessons=(
        "From that day on, {h} always put the {o} back in its place.",
        "{h} had found the {o}, and {h.he} knew that a good friend was worth even more.",
        "On the way home, {h} let {f} carry the {o}.",
    ),
    questions=(
        ("What did {h} lose?", "{h} lost {h.his} {o.full}."),
        ("Who helped {h}?", "{f} helped {h} look for the {o}."),
        ("Where was the {o}?", "The {o} was {spot}."),
    ),
)

NEW_FRIEND = Plot(
    anywhere=True,
    topics=("making a new friend", "a new friend", "two friends"),
    titles=("A New Friend", "{h} Meets {n}", "The New Friend"),
    paragraphs=(
        (
            "{when}, {h} [went for a walk to {p}|was on the way to {p}|went to {p} all alone].",
            "?{look}",
            "There {h.he} saw {n.a}, who was sitting {seat}.",
            "{n} looked [sad|lonely|a little afraid].",
            '"[Hello|Good day|Hi]," said {h}. "[Why are you sitting here all alone?|What is the matter?|Are you lost?]"',
        ),
        (
            '"[I am new here|We came here only yesterday|I just moved here]," said {n}. "[I do not know anyone'
            '|I have no one to play with|Everyone already has a friend but me]."',
            "{h} [knew how that felt|felt sorry for {n}|thought for a moment].",
            "[Then {h.he} smiled and held out some {snack}|Then {h.he} sat down beside {n.him}"
            "|Then {h.he} showed {n} {h.his} {o.full}].",
            '"[Would you like to play with me?|You can be my friend|Then I will be your first friend]{q}"',
            "?{n} [could hardly believe it|looked up and smiled for the first time|nodded and wiped away a tear].",
        ),
        (
            "They [played hide and seek until the sun went down|told each other jokes and laughed a lot"
            "|built a little tower out of stones|ran races and rolled in the grass].",
            "?{n} [knew many games that {h} had never heard of|could whistle like a bird|was very good at riddles].",
            "?When they were hungry, they shared {food}.",
            "When it was time to go home, {n} [did not look sad any more|waved for a long time|was smiling].",
            '"[Will you come back tomorrow?|See you tomorrow?|Shall we play again?]" asked {n}.',
            '"[Of course|Every day, if you like|Yes, I will]," said {h}.',
        ),
    ),
    lessons=(
        "From then on, {h} and {n} were the best of friends.",
        "{h} had gone out alone and come home with a friend.",
        "A kind word was all it took to make a friend.",
    ),
    questions=(
        ("Who did {h} meet?", "{h} met {n.a}."),
        ("Why was {n} sad?", "{n} was new there and had no friends yet."),
        ("Where did {h} meet {n}?", "They met {p.at}."),
    ),
)

HELP = Plot(
    anywhere=True,
    topics=("helping others", "helping {e}", "a kind deed"),
    titles=("{h} Helps Out", "A Helping Hand", "The Kind Deed"),
    paragraphs=(
        (
            "{when}, {h} [saw {e} in the yard|went to visit {e}|came home and found {e} in the kitchen].",
            "{e} was [very tired|not feeling well|busy and out of breath].",
            "There was [a heavy basket to carry|wood to bring in|a whole garden to water|so much washing to hang up],"
            " and {e.he} could not do it alone.",
            '"[Oh dear|Oh my], how will I ever finish?" said {e}.',
        ),
        (
            "{h} had planned to [play with {f}|go to {p}|spend the day with {h.his} {o}].",
            "But {h.he} [looked at {e} and changed {h.his} mind|could see that {e} needed {h.him}|put that off at once].",
            '"[I will help you|Let me do it|Sit down and rest]," {h.he} said. "[I am strong|It will not take long'
            '|I like to help]."',
            "?[At first the work was hard|It was a lot of work|The work was slow], but {h} [did not stop"
            "|sang a song and kept going|did one thing after another].",
            "?Soon {f} came by and helped as well, and then it went twice as fast.",
            "By [noon|evening|the end of the day], everything was done.",
        ),
        (
            '"[What a good helper you are|Thank you, my dear|I am so proud of you]," said {e}, and {e.he} '
            "[gave {h} a big hug|smiled from ear to ear|patted {h} on the head].",
            "Then {e} [brought out {food}|came out with {food}|put {food} on the table].",
            "[The whole room smelled wonderful|Nothing had ever tasted better|That was just what {h} needed].",
            "?They sat [by the window|in the sun|by the fire] and ate together.",
        ),
    ),
    lessons=(
        "{h} was tired that night, but {h.he} felt warm inside.",
        "{h} learned that helping someone can be the best part of the day.",
        "After that, {h} came by every week to help.",
    ),
    questions=(
        ("Who did {h} help?", "{h} helped {e}."),
        ("What did {e} give {h}?", "{e} gave {h} {food}."),
    ),
)

LEARN = Plot(
    anywhere=True,
    topics=("learning to {skill}", "never giving up", "practice"),
    titles=("{h} Learns to {skill.T}", "Try Again, {h}", "Never Give Up"),
    paragraphs=(
        (
            "More than anything, {h} wanted to learn to {skill}.",
            "{when}, {h.he} [saw {f} do it|watched {f} {p.at}], and it looked so easy.",
            '"[Can you teach me?|Please show me how|I want to do that too]{q}" said {h}.',
            '"[Of course|Gladly]," said {f}. "[But it takes time|You must practise every day|Do not give up too soon]."',
        ),
        (
            "So {h} tried to {skill}.",
            "The first time, [it did not work at all|{h.he} got it all wrong|it was a mess].",
            "The second time, [it was only a little better|{h.he} almost did it|it went wrong again].",
            "?[Some of the others laughed|A crow in a tree laughed|{x.A} shook {x.his} head],"
            " and {h} felt {h.his} face grow hot.",
            '"I will never learn it," {h.he} said, and sat down [in the grass|on a stone|with a sigh].',
            'But {e} [had been watching|came and sat beside {h.him}]. "[Everyone falls before they can run'
            '|I had to try a hundred times when I was young|A little every day is enough]," said {e}.',
        ),
        (
            "So {h} [tried again the next day, and the day after that|practised every morning|did not give up].",
            "?{h.He} practised [in the sun and in the rain|before breakfast and after supper|until the stars came out].",
            "And then, one day, [it worked|{h.he} did it|everything went right]!",
            '"[Look at me!|I can do it!|I can {skill}!]" {h} [cried|shouted].',
            "{f} [clapped and cheered|jumped up and down|was just as happy as {h}].",
        ),
    ),
    lessons=(
        "{h} had learned to {skill}, and {h.he} had also learned not to give up.",
        'And whenever something was hard, {h} said, "A little every day is enough."',
        "The next week, {h} taught someone else how to {skill}.",
    ),
    questions=(
        ("What did {h} want to learn?", "{h} wanted to learn to {skill}."),
        ("Who taught {h}?", "{f} taught {h} to {skill}."),
    ),
)

STORM = Plot(
    topics=("a storm", "thunder and rain", "a stormy night"),
    titles=("The Storm", "A Stormy Night", "{h} and the Storm"),
    paragraphs=(
        (
            "{dull}, {h} and {f} were playing {p.at}.",
            "Suddenly, [the sky turned dark|big black clouds came over the hills|the wind began to howl].",
            "[A drop of rain fell on {h}'s nose|The first drops began to fall|There was a flash of light], and then "
            "[the thunder rolled|it began to pour|came a loud crash of thunder].",
            '"[We must go home!|Run!|A storm is coming!]" [cried|shouted] {f}.',
        ),
        (
            "They ran as fast as they could, but [the rain was faster|the path was already full of mud"
            "|home was too far away].",
            '"[There!|Look over there!]" said {h}. "[I see an old barn|I see a little cave|I see a hut]."',
            "They [crept inside|ran in and shook off the water|squeezed in and sat close together].",
            "It was [dark, but it was dry|dry and quiet|small, but the rain could not get in].",
            "?In the corner sat {x.a}, who was hiding from the storm as well, and they all moved together to keep warm.",
        ),
        (
            "[Boom! went the thunder|The thunder boomed|Again the thunder rolled], and {f} [trembled|began to cry|hid"
            " {f.his} face].",
            "{h} was afraid too, but {h.he} [took {f} by the hand|put an arm around {f}|began to sing a little song].",
            '"[The thunder is only loud. It cannot hurt us|Let us count until it is over'
            '|Every storm comes to an end]," {h.he} said.',
            "?They shared {h.his} last {snack} and told each other stories.",
            "Little by little, the storm [moved away|grew quiet|went over the hills].",
        ),
        (
            "When they came out, [the sun was shining|the air smelled fresh and clean|everything sparkled],"
            " and there was a rainbow over {p}.",
            "[At home, {e} was waiting at the door with dry towels and warm milk"
            "|{e} came running to meet them with a big umbrella|{e} hugged them both and made them hot tea].",
        ),
    ),
    lessons=(
        "{h} was never quite so afraid of storms again.",
        "It is easier to be brave when a friend is near.",
        "After that, whenever thunder rolled, {h} and {f} smiled at each other.",
    ),
    questions=(
        ("What did {h} and {f} see after the storm?", "They saw a rainbow over {p}."),
        ("Who was afraid of the thunder?", "{f} was afraid of the thunder, and {h} was a little afraid too."),
    ),
)

PICNIC = Plot(
    topics=("a picnic", "a day out with friends", "a picnic {p.at}"),
    titles=("The Picnic", "A Picnic for Two", "The Empty Basket"),
    paragraphs=(
        (
            "{when}, {h} and {f} [made up their minds to have a picnic|planned a picnic {p.at}].",
            "{h} [packed|brought] {food}, and {f} [packed|brought] {snack}.",
            "?{e} gave them a [blue|red|big] blanket to sit on.",
            "They [carried the basket between them|sang all the way|walked side by side] until they came to {p}.",
            "{look}",
        ),
        (
            "They put the basket down and [ran off to play|went to look at the flowers|chased each other around].",
            "But when they came back, the basket was [empty|almost empty]!",
            '"[Who ate our food?|Our food is gone!]" [cried|said] {h}.',
            "On the ground there was [a trail of crumbs|a line of tiny crumbs].",
            "They followed it [step by step|on tiptoe], and {spot} they found {x.a} with {x.his} mouth full.",
        ),
        (
            '"[I am sorry|Please do not be angry|Oh dear, was it yours?]{q}" said {x.the}. "[I was so hungry'
            '|I had not eaten all day|It smelled so good]."',
            "[{f} was cross|{f} frowned|{f} did not know what to say], but {h} [began to laugh|shook {h.his} head kindly"
            "|felt sorry for {x.him}].",
            '"[Next time, just ask|You could have asked us|There is enough for three]," {h.he} said.',
            "{x.The} [ran off and came back with the sweetest {snack2} they had ever tasted"
            "|showed them a secret place where {snack2} could be found|brought them a pile of fresh {snack2}].",
            "So they all sat down on the blanket and [ate together|had their picnic after all].",
        ),
    ),
    lessons=(
        "It was the best picnic they had ever had.",
        "And the next time they went on a picnic, they packed enough for three.",
        "Food tastes better when it is shared.",
    ),
    questions=(
        ("What did {h} bring?", "{h} brought {food}."),
        ("Who ate the food?", "{x.A} ate the food."),
        ("Where was the picnic?", "The picnic was {p.at}."),
    ),
)

RACE = Plot(
    topics=("a race", "winning and losing", "a race between {h} and {n}"),
    titles=("The Big Race", "{h} and the Race", "The Race"),
    paragraphs=(
        (
            "Every year, there was a great race from [the bridge|the old oak|the village] to {p}.",
            "{when}, {h} [said that {h.he} would run too|wrote {h.his} name on the list|lined up with all the others].",
            "[The fastest runner was {n.a}|Next to {h.him} stood {n.a}], who [had won three times|always bragged"
            "|could run like the wind].",
            '"[You will never beat me|I will win again|Do not even try]," said {n}.',
            '{h} only said, "[I will do my best|We shall see|I am here to have fun]."',
        ),
        (
            '"Ready, steady, go!" called {e}, and they all [began to run|were off|shot forward].',
            "{n} was far ahead, and {h} was [near the end|in the middle|right behind].",
            "?[The sun was hot|The wind was strong|The path was steep], but {h} kept going, one step after another.",
            "Then, [at the last bend|near the stream|halfway up the hill], {n} [tripped over a root|slipped in the mud"
            "|stepped into a hole] and fell.",
            '"[Ouch! My foot!|Help! I cannot get up!]" cried {n}.',
        ),
        (
            "{h} could have run past and won the race.",
            "Instead, {h.he} [stopped|turned back|slowed down].",
            '"[Lean on me|Come, take my hand|I will not leave you here]," {h.he} said, and {h.he} helped {n} up.',
            "Together they [walked|limped|went slowly] over the line, and they were the very last.",
            "But everyone [cheered louder than ever|clapped and called out {h}'s name|threw flowers in the air].",
            '?{e} gave {h} {o.a}. "[This is for the kindest heart|You won something better than a race]," said {e}.',
        ),
    ),
    lessons=(
        "After that, {n} never bragged again, and {n.he} and {h} ran together every day.",
        "{h} did not win the race, but {h.he} won a friend.",
        "{n} said thank you, and {n.he} meant it with all {n.his} heart.",
    ),
    questions=(
        ("Did {h} win the race?", "No, {h} stopped to help {n}, and they came in last together."),
        ("Who fell down?", "{n} fell down during the race."),
    ),
)

SHARE = Plot(
    anywhere=True,
    topics=("sharing", "learning to share", "{o.a} and a friend"),
    titles=("{h} Learns to Share", "Two Can Play", "The {o.FT}"),
    paragraphs=(
        (
            "{h} had {o.a}, and {h.he} [loved it very much|took it everywhere|was very proud of it].",
            "{when}, {f} [came to visit|came over to play|saw it and smiled].",
            '"[What a fine {o}!|That is a lovely {o}!]" said {f}. "[May I play with it?|May I hold it, please?'
            '|Can I have a turn?]"',
            '"No!" said {h}, and {h.he} [hid it behind {h.his} back|held it tight]. "[It is mine|You might break it'
            '|It is only for me]."',
        ),
        (
            "{f} [looked at the ground|said nothing|was hurt] and went away.",
            "{h} was left alone with the {o}.",
            "At first {h.he} was glad, but soon [it was no fun at all|{h.he} grew bored|the house felt too quiet].",
            "?{h.He} [turned the {o} this way and that|put the {o} on the table and looked at it|sighed and sighed].",
            '{e} asked, "[Why the long face?|Why are you alone?|Where is {f}?]"',
            'When {h} told {e.him}, {e} said, "[A thing is only half as nice when you keep it all to yourself'
            "|You can have the {o} and no friend, or half of the {o} and a whole friend"
            '|Sharing does not make your {o} smaller]."',
        ),
        (
            "{h} thought about it for a while.",
            "Then {h.he} [picked up the {o} and ran to {p}|took the {o} and went to look for {f}|ran out of the door].",
            '{f} was sitting {seat}. "[I am sorry|I was wrong|I was not nice]," said {h}. "[You go first'
            '|Let us play with it together|You can hold it as long as you like]."',
            "{f} [smiled|was not angry for long|jumped up], and they [took turns all afternoon|played until it was dark"
            "|laughed as they had never laughed before].",
        ),
    ),
    lessons=(
        "{h} found out that the {o} was twice as much fun with two.",
        "From that day on, {h} shared everything with {f}.",
        "That is how {h} learned to share.",
    ),
    questions=(
        ("What did {h} not want to share?", "{h} did not want to share {h.his} {o.full}."),
        ("What did {h} say to {f} at the end?", "{h} said sorry, and then they played together."),
    ),
)

BIRTHDAY = Plot(
    anywhere=True,
    topics=("a birthday", "a birthday surprise", "a gift for {f}"),
    titles=("The Birthday Surprise", "A Gift for {f}", "Happy Birthday, {f}"),
    paragraphs=(
        (
            "[Tomorrow was {f}'s birthday|It was almost {f}'s birthday], and {h} [had no gift yet"
            "|did not know what to give {f.him}].",
            "{when}, {h.he} [went to {p} to look for something nice|counted {h.his} coins, but there were only two"
            "|asked {e} for help].",
            '"[A gift does not have to cost much|The best gifts are made by hand|Think of what makes {f.him} smile],"'
            " {e} [told {h.him}|said].",
        ),
        (
            "{h} [thought and thought|sat down to think|walked up and down].",
            "Then {h.he} had [an idea|a wonderful idea]!",
            "{h.He} [worked all day|shut the door and set to work|asked everyone not to tell].",
            "{h.He} made {o.a} all by {h.himself}, and {e} baked {cake}.",
            "?{h.He} [painted a little star on it|wrapped it in paper and tied it with string|hid it under the bed].",
            "?{h.He} asked all the neighbours to come, and {x.a} [promised to bring flowers|hung up paper lanterns].",
        ),
        (
            "On the birthday, {f} [opened the door and everything was dark|came in and saw no one"
            "|thought that everyone had forgotten].",
            '"Surprise!" [they all shouted|called {h}|cried everyone], and [the candles were lit'
            "|they all began to sing|the lights came on].",
            "{f} [opened the gift with shaking hands|saw the {o} and gasped|held the {o} up to the light].",
            '"[This is the best gift of all|It is perfect|I will keep it forever]," {f.he} said.',
            "?They [ate {cake} and danced|played games|told stories] until the moon came up.",
        ),
    ),
    lessons=(
        "{h} was even happier than {f}.",
        "{h} learned that a gift made with love is the best gift.",
        "Nobody wanted to go home that night.",
    ),
    questions=(
        ("Whose birthday was it?", "It was {f}'s birthday."),
        ("What did {h} make for {f}?", "{h} made {o.a}."),
        ("What did {e} bake?", "{e} baked {cake}."),
    ),
)

GARDEN = Plot(
    topics=("a garden", "growing a {plant}", "a little seed", "being patient"),
    titles=("The Little Seed", "The {plant.T}", "{h} Waits"),
    paragraphs=(
        (
            "{when}, {e} gave {h} [a tiny seed|a small brown seed|a seed in a paper bag].",
            '"[What will it be?|Is that all?|It is so small]{q}" said {h}.',
            '"[Wait and see|Plant it, and you will find out|Be patient]," said {e}.',
            "So {h} [dug a little hole|found a sunny spot], put the seed into the earth and gave it water.",
        ),
        (
            "The next day, {h} [ran out to look|went to see it]. There was nothing but earth.",
            "[A day passed, and then another|A whole week passed], and still nothing grew.",
            '?[{f} said, "Maybe it is asleep."|{x.A} came by and said that seeds take time.]',
            "{h} [wanted to dig it up|almost gave up|stamped {h.his} foot].",
            'But {e} said, "[Good things take time|The seed is working under the ground|It only needs rain and sun]."',
            "So every day {h} [gave it water|pulled up the weeds|sang to it], and every day {h.he} waited.",
        ),
        (
            "Then, one [morning|sunny morning], there was [a tiny green leaf|a little green shoot]!",
            "It grew [higher and higher|day by day|a bit more every night].",
            "By [summer|the end of summer], it was {plant.a}, and it was taller than {h}.",
            '"[Look what I grew!|It was worth the wait|It is beautiful]{q}" said {h}.',
            "?Everyone came to see it, and {f} said that it was the finest {plant} in the land.",
        ),
    ),
    lessons=(
        "{h} kept one seed in a little box, to plant it next year.",
        "{h} had learned how to wait.",
        "And {h} gave a small seed to {f}, too.",
    ),
    questions=(
        ("What grew from the seed?", "{plant.A} grew from the seed."),
        ("Who gave {h} the seed?", "{e} gave {h} the seed."),
    ),
)

DARK = Plot(
    topics=("being afraid of the dark", "a strange sound in the night", "being brave"),
    titles=("A Sound in the Night", "{h} and the Dark", "The Brave Little Heart"),
    paragraphs=(
        (
            "One night, {h} could not sleep.",
            "[The room was very dark|There was no moon|The wind was blowing around the house], and {h.he} heard a strange"
            " sound.",
            "[Scratch, scratch, it went|Tap, tap, tap, it went|Whoo, it went].",
            '"[Who is there?|What is that?]" {h} whispered, but [no one answered|there was no answer].',
            "?{h.He} pulled the blanket up to {h.his} nose, and {h.his} heart beat fast.",
        ),
        (
            "{h} wanted to [hide|call for {e}|run away].",
            'Then {h.he} thought, "[If I do not look, I will be afraid all night|Maybe someone needs help'
            '|I can be brave for one minute]."',
            "So {h.he} took [a little lantern|a candle|a small lamp] and went [to the window|to the door|outside], one "
            "step at a time.",
            "The sound [grew louder|came again|was very near now].",
            "{h} held up the light, and there was {x.a}!",
        ),
        (
            '"[I am sorry|Please do not be afraid|Excuse me]," said {x.the}. "[I lost my way in the dark|I am cold'
            '|I saw your house and hoped for a friend]."',
            "{h} [laughed out loud|took a deep breath|had to smile].",
            '"[You were afraid too!|And I thought you were a monster|Come in and get warm]{q}" {h.he} said.',
            "{h.He} gave {x.the} [some {snack}|a warm place by the fire|a cup of warm milk], and they talked until they "
            "were both sleepy.",
            "?In the morning, {e} found them [asleep side by side|sleeping by the fire] and [smiled|shook {e.his} head]"
            ".",
        ),
    ),
    lessons=(
        "After that night, {h} was not afraid of the dark any more.",
        "{h} learned that being brave means doing the right thing even when you are afraid.",
        "And the next time {h} heard a strange sound, {h.he} was just a little bit curious.",
    ),
    questions=(
        ("What made the strange sound?", "It was {x.a}."),
        ("Why could {h} not sleep?", "{h} heard a strange sound in the dark."),
    ),
)

TRUTH = Plot(
    topics=("telling the truth", "a broken vase", "being honest"),
    titles=("The Broken Vase", "{h} Tells the Truth", "The Honest Heart"),
    paragraphs=(
        (
            "{when}, {h} was playing [with a ball|with {f}] inside the house, although {e} had said not to.",
            "[Bump!|Crash!|Oh no!] The [blue|white|big] vase fell [off the table|from the shelf] and broke into [many"
            "|a hundred] pieces.",
            "{h} [stood still|held {h.his} breath|did not dare to move].",
            "It was {e}'s favourite vase.",
        ),
        (
            "{h} [put the pieces in a box and hid it|pushed the pieces under the carpet|swept the pieces behind the "
            "door].",
            '"No one will know," {h.he} thought.',
            "But all day long, {h.he} [had a pain in {h.his} tummy|could not eat or play|felt bad].",
            '?When {f} asked what was wrong, {h} said, "[Nothing|It is nothing]," and that made it even worse.',
            'That evening, {e} asked, "Has anyone seen my vase?"',
        ),
        (
            "{h} could [have said no|have blamed the wind|have said nothing].",
            "Instead, {h.he} [began to cry|took a deep breath|stepped forward].",
            '"[It was me|I broke it|I did it], and I hid the pieces," {h.he} said. "I am [so|very] sorry."',
            "{e} was quiet for a moment.",
            'Then {e.he} said, "[I am sad about the vase, but I am glad that you told me'
            '|A vase can be mended. It is harder to mend a lie|Thank you for telling me the truth. That was brave]."',
            "Together they [glued the pieces|put the vase back together], and {h} painted a [flower|star|sun] over the "
            "biggest crack.",
        ),
    ),
    lessons=(
        "{e} said that the vase was even prettier than before.",
        "{h} slept well that night, because {h.he} had told the truth.",
        "From that day on, {h} always told the truth, even when it was hard.",
    ),
    questions=(
        ("What did {h} break?", "{h} broke {e}'s favourite vase."),
        ("Did {h} tell the truth?", "Yes, in the end {h} told the truth."),
    ),
)

RESCUE = Plot(
    topics=("saving someone", "a rescue", "{x.a} in trouble"),
    titles=("The Rescue", "Help Is Coming", "{h} to the Rescue"),
    paragraphs=(
        (
            "{when}, {h} was walking [to|past|home from] {p}.",
            "?{look}",
            'All at once, {h.he} heard a [small|weak|tiny] voice. "[Help! Help!|Please help me!|Is anyone there?]"',
            "{h} [looked around|ran toward the voice|stopped and listened], and soon {h.he} saw {x.a}.",
            "{x.The} was [stuck in the mud|caught in an old net|trapped under a fallen branch"
            "|sitting at the bottom of a deep hole].",
        ),
        (
            '"[Hold on|Do not be afraid|Stay calm]!" said {h}. "[I will get you out|I will help you]."',
            "{h} pulled [with all {h.his} might|as hard as {h.he} could], but [it was no use"
            "|{h.he} was not strong enough|nothing moved].",
            "So {h.he} ran to fetch {f}.",
            "?On the way, {h.he} did not stop once, not even to catch {h.his} breath.",
            "{f} brought [a long rope|a strong rope|a stick and a rope], and they [tied it tight|made a loop].",
            '"[One, two, three, pull!|Now pull!]" said {h}, and the two friends pulled together.',
            "[Slowly|Bit by bit|With a loud pop], {x.the} came free.",
        ),
        (
            '"[You saved me!|How can I ever thank you?|I will never forget this]{q}" said {x.the}.',
            '"[Anyone would have done it|You would have done the same|We are glad that you are safe]," said {h}.',
            "[{x.The} gave them {o.a} that {x.he} had found|{x.The} led them to a bush full of ripe berries"
            "|{x.The} told them a secret way home].",
        ),
    ),
    lessons=(
        "What one could not do alone, two could do together.",
        "And later, when {h} was in trouble, {x.the} came to help {h.him}.",
        "That evening, {h} and {f} told {e} the whole story.",
    ),
    questions=(
        ("Who needed help?", "{x.A} needed help."),
        ("Who helped {h}?", "{f} helped {h}."),
    ),
)

BUILD = Plot(
    topics=("building a {build}", "working together", "a new {build}"),
    titles=("The {build.T}", "{h} Builds a {build.T}", "Stick by Stick"),
    paragraphs=(
        (
            "{when}, {h} had [an idea|a big idea].",
            '"[Let us build a {build}!|I want to build a {build}!]" {h.he} [told {f}|said to {f}].',
            '"[A {build}? Can we do that?|That sounds like a lot of work|I like that idea]{q}" said {f}.',
            "First they made a [plan|drawing]. Then they looked for [wood, nails and string|old boards and rope"
            "|sticks, stones and moss].",
        ),
        (
            "{h} wanted to do everything [fast|quickly], but {f} wanted to do it [slowly|with care].",
            '"[You are too slow|Hurry up]," said {h}. "[You are too fast|Wait]," said {f}.',
            "Because they did not [work together|listen to each other], the {build} [fell down|broke in two"
            "|leaned to one side and fell over].",
            "?They sat in the middle of the mess and did not say a word.",
            '?{e} [came by and looked at it|brought them {snack}]. "[One hand alone cannot clap|Try it together]," {e} '
            "said.",
            '"[I should have listened to you|I am sorry]," said {h}. "[I am sorry too|Me too]," said {f}.',
        ),
        (
            "So they [started again|began once more].",
            "This time, {h} [held the boards|carried the wood], and {f} [tied the knots|measured everything twice].",
            "They [sang while they worked|helped each other|worked side by side] until the sun was low.",
            "At last, the {build} was finished, and it [stood strong and straight|was even better than the plan"
            "|was the best one they had ever seen].",
            "?They painted it [red and yellow|blue|green] and wrote both their names on it.",
        ),
    ),
    lessons=(
        "They had built it together, and that made it special.",
        "The {build} lasted for many years, and so did their friendship.",
        "From then on, {h} listened before {h.he} began.",
    ),
    questions=(
        ("What did {h} and {f} build?", "They built a {build}."),
        ("Why did it fall down at first?", "It fell down because they did not work together."),
    ),
)

SNOW = Plot(
    topics=("snow", "a snowy day", "a winter day"),
    titles=("The First Snow", "A Snowy Day", "{h} in the Snow"),
    paragraphs=(
        (
            "One winter morning, {h} looked out of the window and [gasped|rubbed {h.his} eyes|jumped for joy].",
            "[Everything was white|The whole world was covered in snow|It had snowed all night].",
            "{h} put on {h.his} [warm coat|thick scarf|woolly hat] and ran out to find {f}.",
            "[Crunch, crunch, went the snow under {h.his} feet|The snow was deep and soft|The air was cold and clear].",
        ),
        (
            "{h} and {f} [threw snowballs|slid down the hill|made angels in the snow|caught snowflakes on their tongues]"
            " and laughed.",
            "Then they built a [big|round|funny] snowman with [a carrot for a nose|two stones for eyes"
            "|a smile made of berries].",
            '"[He looks cold|He needs a name|He looks lonely]," said {f}.',
            "So {h} [gave him {h.his} own scarf|put a hat on his head|named him Mister Frost|made a small snow dog to "
            "keep him company].",
            "?While they were working, {x.a} came by, [shivering with cold|looking for food].",
            "When their fingers were [cold|red with cold], they went in to {e}, who had made {food}.",
        ),
        (
            "They sat [by the fire|by the stove] and watched the snow fall.",
            '"[I wish it would snow every day|Will the snowman be there in the morning?|This was the best day]{q}" said'
            " {h}.",
            '{e} smiled. "[Enjoy it while it lasts|Snow comes and goes, but it always comes back'
            '|Every season has its own joy]," {e.he} said.',
        ),
    ),
    lessons=(
        "Outside, the snowman stood in the moonlight and seemed to smile.",
        "In spring the snowman melted, but {h} and {f} did not forget him.",
        "That night, {h} dreamed of snow.",
    ),
    questions=(
        ("What did {h} and {f} build?", "They built a snowman."),
        ("What did {e} make?", "{e} made {food}."),
    ),
)

TREASURE = Plot(
    topics=("a treasure", "a treasure map", "an adventure {p.at}"),
    titles=("The Treasure Map", "The Secret Map", "The Treasure"),
    paragraphs=(
        (
            "{when}, {h} found an old map [in a bottle|inside a dusty book|under a loose board|in the attic].",
            "There was a big red cross on it, right beside {p}.",
            '"[A treasure map!|This must be a treasure map!]" said {h}, and {h.he} ran to show it to {f}.',
            '"[Let us go at once|What are we waiting for?|I will bring a spade]{q}" said {f}.',
        ),
        (
            "They walked [over the bridge and past the old mill|a hundred steps to the north|along the stream and up a "
            "hill].",
            "?They met {x.a}, who [showed them the right way|wished them good luck|warned them about the deep mud].",
            "When they came to {p}, {look.l}",
            '"[The cross must be here|Dig here]," said {h}. They dug and dug.',
            "?They were [hot and tired|covered with earth], but they did not stop.",
            "Suddenly there was a [clunk|thump]. It was [a small box|an old wooden box|a rusty iron box]!",
        ),
        (
            "{h} opened the lid with [shaking hands|a deep breath].",
            "There was no gold inside. There was only {o.a} and a [letter|note].",
            '{f} read it out loud. "[Whoever finds this has walked a long way with a friend. That friend is your '
            "treasure|The real treasure is the one who is standing next to you|You found this because you did not give "
            'up. Well done]."',
            "The two friends looked at each other and [smiled|laughed|were quiet for a moment].",
            "They [took turns carrying the {o} home|put their own letter into the box for the next one who would find it"
            "|took the {o} home and put it in a place where everyone could see it].",
        ),
    ),
    lessons=(
        "It was not gold, but it was a treasure all the same.",
        "{e} laughed when {e.he} heard of it, because {e.he} had hidden the box many years ago.",
        "{h} kept the old map forever.",
    ),
    questions=(
        ("What was in the box?", "There was {o.a} and a letter in the box."),
        ("What did {h} find?", "{h} found an old map."),
    ),
)

STAR = Plot(
    topics=("a wish", "a star", "the moon and the stars", "bedtime"),
    titles=("The Little Star", "{h}'s Wish", "A Wish at Night"),
    paragraphs=(
        (
            "{h} [had a wish|wished for something every night]. {h.He} wanted to [touch a star|visit the moon"
            "|see what was behind the stars].",
            "Every evening, {h.he} [sat on the roof|climbed up the hill|lay in the grass] and looked up at the sky.",
            '"[The stars are so far away|How can I ever get up there?|I would need a very long ladder]{q}" {h.he} said.',
            "?{e} [smiled and brought {h.him} a blanket|sat down beside {h.him}|told {h.him} the names of the stars].",
        ),
        (
            "One night, [a tiny light|a little star|something bright] fell from the sky and landed {spot}.",
            "{h} [ran to it|crept closer|could not believe {h.his} eyes].",
            "It was a small star, and it was [crying|shaking|glowing very weakly].",
            '"[I fell down|I slipped], and I cannot get home," said the star.',
            '"[Do not cry|I will help you]," said {h}. "[I know someone who can fly|I have an idea|We will find a way]."',
            "?{h.He} wrapped the star in {h.his} blanket, and it was as warm as toast.",
        ),
        (
            "So {h} carried the star to [the top of the highest hill|the top of the tower|the tallest tree].",
            "[There {h.he} tied it to {f}'s kite, and the kite rose up and up"
            "|There an old owl took it gently and flew up and up|There the wind lifted it, and it rose up and up].",
            "[Soon there was one more light in the sky|At last the star was back in its place], and it [winked at {h}"
            "|shone brighter than all the others].",
            "?{h} waved until {h.his} arm was tired.",
        ),
    ),
    lessons=(
        "{h} had touched a star after all.",
        "And if you look up tonight, you may see that star wink at you, too.",
        "From then on, {h} never felt alone at night.",
    ),
    questions=(
        ("What fell from the sky?", "A little star fell from the sky."),
        ("Where did the star want to go?", "The star wanted to go home to the sky."),
    ),
)

LOST_WAY = Plot(
    topics=("getting lost", "finding the way home", "being lost in the woods"),
    titles=("The Way Home", "{h} Gets Lost", "Lost in the Woods"),
    paragraphs=(
        (
            "{when}, {h} went into the woods to [pick berries|look for mushrooms|gather sticks].",
            '"[Do not go too far|Stay on the path|Be home before dark]," said {e}.',
            "But {h} saw [a blue butterfly|a shiny beetle|a little bird with a red tail] and [ran after it"
            "|followed it from tree to tree].",
            "When {h.he} stopped, [there was no path|all the trees looked the same|{h.he} did not know where {h.he} was].",
        ),
        (
            '"[Hello? Is anyone there?|Which way is home?]" {h} called, but only [the wind answered|an echo came back].',
            "{h} [sat down on a log and cried a little|felt a lump in {h.his} throat|turned around three times].",
            "Then {h.he} [remembered what {e} had taught {h.him}|dried {h.his} eyes and thought].",
            "?[The sun goes down in the west, and home is in the west|Moss grows where it is damp|Water always runs down"
            " to the village]. That was what {e} had always said.",
            "After a while, {h.he} met {x.a}.",
            '"[Follow the stream|Walk toward the setting sun|Go left at the big oak]," said {x.the}, "and you will be '
            'home before dark."',
        ),
        (
            "{h} [thanked {x.the} and walked on|gave {x.the} some berries and went on {h.his} way].",
            "{h.He} walked [and walked|without stopping|past rocks and ferns], and at last {h.he} saw [a light"
            "|smoke from a chimney|the roof of {h.his} home].",
            "{e} was standing [at the door|at the gate] with a lantern.",
            '"[There you are!|I was so worried!]" said {e}, and {e.he} hugged {h} tight.',
            "?They had {food} for supper, and {h} told {e.him} everything.",
        ),
    ),
    lessons=(
        "From then on, {h} stayed on the path.",
        "{h} was glad to be in {h.his} own bed that night.",
        "There is no place like home, thought {h}, and {h.he} fell asleep.",
    ),
    questions=(
        ("Why did {h} get lost?", "{h} left the path and ran into the woods."),
        ("Who showed {h} the way?", "{x.A} showed {h} the way home."),
    ),
)

BAKE = Plot(
    topics=("baking", "a mistake that turned out well", "cooking with {e}"),
    titles=("The Upside Down Cake", "{h} Bakes", "Too Much Salt"),
    paragraphs=(
        (
            "{when}, {h} and {e} [wanted to bake something|were in the kitchen].",
            '"[Today we will make {cake}|Let us make {cake}]," said {e}.',
            "{h} [put on an apron|washed {h.his} hands|got out the big bowl], and {e} read out the recipe.",
            "They needed flour, eggs, milk and [a little sugar|a spoon of sugar|butter].",
        ),
        (
            "{h} wanted to do it all alone, so when {e} went out to [fetch the eggs|feed the hens|get more wood],"
            " {h.he} began.",
            "{h.He} took [the white jar|the big jar|the jar on the left] and poured in [a whole cup|two big spoons].",
            "But it was not sugar. It was salt!",
            "?{h} [tasted it and made a face|took a little taste, and {h.his} eyes grew wide].",
            '"[Oh no|Oh dear], I have spoiled it," said {h}, and {h.he} [was close to tears|hung {h.his} head].',
        ),
        (
            "{e} came back and [tasted it too|saw the jar]. {e.He} began to laugh.",
            '"[When I was little, I did the same thing|Everyone makes mistakes|That is how cooks learn]," {e.he} said. '
            '"[We will simply start again|Let us make salty crackers out of it|Let us try once more, together]."',
            "This time, {h} [read every label|tasted everything first|waited for {e}].",
            "Soon the whole house smelled [sweet|wonderful|of good things].",
            "{friend} [followed the smell to the door|came in and asked for a piece], and they all ate until there was "
            "nothing left.",
        ),
    ),
    lessons=(
        "After that, {h} always looked twice before {h.he} poured.",
        "{h} wrote SALT on the jar in big letters.",
        "A mistake is only a step on the way, {e} said.",
    ),
    questions=(
        ("What did {h} pour in by mistake?", "{h} poured in salt and not sugar."),
        ("What did they bake?", "They wanted to make {cake}."),
    ),
)

SONG = Plot(
    anywhere=True,
    topics=("music", "a song", "singing in front of others"),
    titles=("The Song", "{h} Sings", "The Quiet Voice"),
    paragraphs=(
        (
            "There was going to be a [great feast|music night|spring party] {p.at}, and everyone had to [sing|play a "
            "song].",
            "{h} [loved music|knew many songs], but {h.he} only sang when no one was near.",
            "{when}, {f} heard {h.him} singing [in the garden|by the window|behind the house].",
            '"[That was beautiful!|You have a lovely voice!]" said {f}. "[You must sing at the feast|Will you sing for '
            'everyone?]{q}"',
        ),
        (
            "{h} [turned red|shook {h.his} head|looked down].",
            '"[I cannot. Everyone would look at me|What if I forget the words?|My voice is too small]{q}" {h.he} said.',
            '"[Then look only at me|I will stand beside you|Close your eyes and sing for me]," said {f}.',
            "?Every evening they practised, and every evening {h}'s voice grew a little stronger.",
            "?{e} listened from the window and [nodded|smiled|tapped {e.his} foot].",
        ),
        (
            "On the day, {h}'s knees [shook|trembled].",
            "{h.He} [stepped forward|climbed onto the little stage|opened {h.his} mouth], but [no sound came out"
            "|{h.he} forgot the first word].",
            "Then {h.he} saw {f} [smile|nod|in the first row], and {h.he} [began|took a breath and began].",
            "The song [rose up like a bird|was soft at first and then clear as a bell|filled the air].",
            "When it was over, [it was very quiet, and then everyone clapped|everyone stood up and cheered"
            "|even {x.a} in the last row wiped away a tear].",
        ),
    ),
    lessons=(
        "{h} was still shy, but never again too shy to sing.",
        "{h} knew that {f} had given {h.him} the greatest gift.",
        "After that, {h} sang every year.",
    ),
    questions=(
        ("Who heard {h} sing?", "{f} heard {h} sing."),
        ("Why did {h} not want to sing?", "{h} was shy and afraid to sing in front of everyone."),
    ),
)

QUARREL = Plot(
    anywhere=True,
    topics=("a quarrel", "saying sorry", "two friends who make up"),
    titles=("The Quarrel", "Saying Sorry", "Friends Again"),
    paragraphs=(
        (
            "{h} and {f} [were the best of friends|did everything together].",
            "But {when.l}, they had a quarrel about [who was faster|a game|the last of the {snack}|{o.a}].",
            '"[It was my turn!|You are not fair!|You started it!]" [shouted|said] {h}.',
            '"[I do not want to play with you any more|Then play alone]!" said {f}, and {f.he} [stamped off'
            "|turned around and left].",
        ),
        (
            "[One day passed|Two days passed], and they did not speak to each other.",
            "{h} [tried to play alone|went to {p} alone|kicked a stone down the road], but [nothing was fun|it was not "
            "the same|everything was dull].",
            "?[Something funny happened, and there was no one to tell|{h.He} found {x.a}, and there was no one to show].",
            "{f} was [just as sad|lonely too], but neither of them wanted to be the first to speak.",
            '"[A sorry is a small word, but it opens big doors|Someone has to go first|Do you want to be right, or do you'
            ' want to have a friend?]{q}" {e} said to {h}.',
        ),
        (
            "So {h} [took a deep breath and went to {f}'s home|picked some flowers and went out|set off].",
            "Halfway there, {h.he} met {f}, who was on {f.his} way to {h}!",
            '"I am sorry!" they both said at the same time.',
            "Then they [laughed|hugged|began to laugh], and [neither of them could remember what the quarrel had been "
            "about|the quarrel was over].",
            "?{h} [gave {f} the flowers|shared {h.his} {snack2} with {f}|asked {f} to come home with {h.him}].",
        ),
    ),
    lessons=(
        "They still quarrelled now and then, but never for long.",
        "{h} never forgot how good it felt to say sorry.",
        "That evening, the two friends watched the sun go down side by side.",
    ),
    questions=(
        ("Who had a quarrel?", "{h} and {f} had a quarrel."),
        ("What did they say at the end?", "They both said that they were sorry."),
    ),
)

GIVE = Plot(
    topics=("giving something away", "being generous", "a stranger in need", "{o.a}"),
    titles=("The {o.FT}", "The Best Gift", "{h} Gives"),
    paragraphs=(
        (
            "{h} had saved up for a long time, and {when.l}, {h.he} bought {o.a} at the market.",
            "{h.He} [carried it home carefully|was so happy that {h.he} skipped all the way|looked at it every few steps].",
            "On the way, {h.he} met {x.a}, who was [sitting alone at the side of the road|very sad|crying softly].",
            '"[What is wrong?|Can I help you?|Why are you so sad?]" asked {h}.',
        ),
        (
            '"[I once had {o.a} just like yours|My little one is sick, and I have no gift to bring home'
            '|Today is my birthday, and nobody remembered]," said {x.the}.',
            "{h} looked at the {o}, and {h.he} looked at {x.the}.",
            "?It was [not easy|very hard], because {h.he} had waited so long for it.",
            'Then {h.he} held it out. "[Take it|Please take it|It is for you]," {h.he} said. "[You need it more than I do'
            '|I hope it makes you happy|I want you to have it]."',
            "{x.The} [could not speak for joy|smiled with {x.his} whole face|danced around in a circle].",
        ),
        (
            "{h} went home with empty hands, but {h.his} [heart was light|steps were light].",
            "?{e} asked where the {o} was, and when {h} told {e.him}, {e.he} was very proud.",
            "[A week later|Some days later|Not long after], there was a knock at the door.",
            "It was {x.the}, and {x.he} had brought [{food}|a basket full of {snack}|a little painting of {h}].",
            '"[One kindness calls another|For my friend|You made me smile, and now I want to make you smile]," said'
            " {x.the}.",
        ),
    ),
    lessons=(
        "And so {h} had lost {o.a} and found a friend.",
        "{h} learned that giving can feel even better than getting.",
        "They ate together and laughed until the evening.",
    ),
    questions=(
        ("What did {h} buy?", "{h} bought {o.a}."),
        ("Who did {h} give it to?", "{h} gave it to {x.a}."),
    ),
)

MYSTERY = Plot(
    topics=("a mystery", "missing {snack}", "who took the {snack}"),
    titles=("The Missing {snack.T}", "The Mystery", "Detective {h}"),
    paragraphs=(
        (
            "{when}, {e} [came out of the kitchen with a frown|called everyone together].",
            '"[Someone has been taking my {snack}|My {snack} are gone again]," said {e}. "[Every morning, a few are '
            'missing|Yesterday there were ten, and now there are six]."',
            '"[This is a case for me|I will find out who did it]!" said {h}.',
            "?{h.He} put on {h.his} best hat and took [a magnifying glass|a pencil and some paper], as real detectives do.",
        ),
        (
            'First, {h} asked {f}. "[It was not me|I was asleep|I do not even like {snack}]," said {f}.',
            "Then {h.he} looked for clues. On the floor there were [tiny footprints|a few crumbs|little marks in the "
            "flour].",
            "That night, {h} and {f} hid [behind the door|under the table] and waited.",
            "?The clock ticked, and {f} [almost fell asleep|had to hold back a sneeze].",
            "[At midnight|Just before dawn], they heard something. [Tip, tap, tip, tap|Patter, patter, patter].",
            "There was {x.a}, carrying {snack} out of the door!",
        ),
        (
            '"[Stop!|Got you!]" said {h}, and {x.the} [dropped everything|jumped with fright].',
            '"[Please forgive me|I am sorry]," {x.the} said. "[I have five little ones at home, and they are hungry'
            '|Winter is coming, and I have nothing to eat]."',
            "{h} [lowered {h.his} voice|scratched {h.his} head|looked at {f}]. This was not a thief. This was someone who "
            "needed help.",
            "In the morning, {h} told {e} everything, and {e} [filled a whole basket with {snack} for {x.the}"
            "|said that from now on there would always be a bowl of {snack} by the door].",
        ),
    ),
    lessons=(
        "The mystery was solved, and {h} had made a new friend.",
        "{h} was a very good detective, and an even better neighbour.",
        "And no one ever had to take {snack} in secret again.",
    ),
    questions=(
        ("What was missing?", "Some {snack} were missing."),
        ("Who took the {snack}?", "{x.A} took the {snack}."),
    ),
)

CALM_DAY = Plot(
    topics=("a quiet day", "a walk to {p}", "a happy day"),
    titles=("A Day {p.atT}", "A Quiet Day", "A Walk with {f}"),
    paragraphs=(
        (
            "{when}, {h} [woke up early|got up with the sun] and had {food} for breakfast.",
            "Then {h.he} [went to see {f}|called {f}|knocked at {f}'s door]. \"[Shall we go to {p}?|Will you come to {p} "
            'with me?]" {h.he} asked.',
            '"[Yes, please|What a good idea|I was hoping you would ask]," said {f}.',
        ),
        (
            "It was a nice walk to {p}.",
            "{look}",
            "?They [counted their steps|picked wild flowers|stopped to greet {x.a}] on the way.",
            "{h} [found {o.a} {spot}|made a crown of leaves for {f}|skipped stones], and {f} [told a funny story"
            "|sang a song|climbed a tree to look around].",
            "They ate {snack} and [watched the clouds|lay in the shade|listened to the wind].",
            '"[That cloud looks like a sheep|I can see a face in that cloud|I wish this day would never end]," said {h}.',
        ),
        (
            "When the sun [went down|was low], they walked home [slowly|hand in hand|with tired feet].",
            '"[Nothing much happened today|We did not do anything big today]," said {f}.',
            '"[No, and it was perfect|That is why I liked it so much]," said {h}.',
        ),
    ),
    lessons=(
        "Some of the best days are the quiet ones.",
        "At night, {h} could still smell the flowers.",
        "And they did it all again the next week.",
    ),
    questions=(
        ("Where did they go?", "They went to {p}."),
        ("What did they eat?", "They ate {snack}."),
    ),
)

PLOTS: tuple[Plot, ...] = (
    LOST, NEW_FRIEND, HELP, LEARN, STORM, PICNIC, RACE, SHARE, BIRTHDAY, GARDEN, DARK, TRUTH, RESCUE, BUILD, SNOW,
    TREASURE, STAR, LOST_WAY, BAKE, SONG, QUARREL, GIVE, MYSTERY, CALM_DAY,
)  # fmt: skip

SKILLS: tuple[str, ...] = (
    "swim", "whistle", "skate", "fly a kite", "ride a bicycle", "juggle", "dance", "climb", "play the flute",
    "jump rope", "tie a bow", "paint", "catch a ball", "row a boat", "do a handstand", "read", "sew", "tell the time",
)  # fmt: skip
BUILDS: tuple[str, ...] = (
    "tree house", "boat", "bridge", "raft", "bird house", "little hut", "sled", "windmill", "swing", "bench",
    "puppet theatre", "kite", "cart", "tower",
)  # fmt: skip

OPENINGS: tuple[str, ...] = (
    "Once upon a time, there [was|lived] {h.a}.",
    "Once upon a time, there [was|lived] {h.a}.",
    "Once upon a time, there [was|lived] {h.a} who lived in {land}.",
    "Once upon a time, in {land}, there lived {h.a}.",
    "Once upon a time, in {land}, there lived {h.a}.",
    "Once upon a time, {h.a} lived in {land}.",
    "Once upon a time, {h.a} lived in {h.home} near {p}.",
    "There was once {h.a}.",
    "There once lived {h.a} in {land}.",
    "Long ago, in {land}, there lived {h.a}.",
    "A long time ago, there was {h.a}.",
    "In {land}, there lived {h.a}.",
    "In {h.home} near {p} lived {h.a}.",
    "This is the story of {h.a}.",
    "{h} was {h.plain} who lived in {land}.",
    "{h}{h.tag} lived in {h.home} near {p}.",
    "Far, far away, there lived {h.a}.",
    "Do you know {h}? {h} was {h.plain} who lived in {land}.",
)  # fmt: skip
FRIEND_LINES: tuple[str, ...] = (
    "{h.His} best friend was {f.a}.",
    "{h.He} had a good friend, {f.a}.",
    "{h.His} best friend was {f.a}, and they did everything together.",
    "Next door lived {f.a}, who was {h.his} best friend.",
)
HOBBY_LINES: tuple[str, ...] = (
    "{h} loved to {hobby}.",
    "{h.He} [loved|liked] to {hobby} and to {hobby2}.",
    "Every day, {h.he} liked to {hobby}.",
    "Most of all, {h} liked to {hobby}.",
)
ENDINGS: tuple[str, ...] = (
    "That night, {h} [fell asleep with a smile|slept well|had sweet dreams].",
    "And they all lived happily ever after.",
    "{h} had never been so happy.",
    "It had been a very good day.",
    "And {h} was happy.",
    "When {h} went to bed, {h.he} was still smiling.",
)
LATER: tuple[str, ...] = (
    "The next day", "The next morning", "A few days later", "A week later", "One day soon after", "Some time later",
    "Not long after that", "On the following day",
)  # fmt: skip

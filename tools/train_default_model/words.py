"""Word lists from which prompts are made. Data only, written for this project."""

from __future__ import annotations

__all__ = [
    "ADJECTIVES",
    "ANIMALS",
    "CATEGORIES",
    "CHARACTERS",
    "CONTRASTS",
    "COUNTRIES",
    "EVENTS",
    "EVERYDAY",
    "FEELINGS",
    "FIRST_NAMES",
    "FOODS",
    "GOALS",
    "LESSONS",
    "MACHINES",
    "OBJECTS",
    "PLACES",
    "PLURAL_TOPICS",
    "REASONS",
    "SCENES",
    "TASKS",
    "TOPICS",
    "WHYS",
    "WISHES",
]


def _split(text: str) -> tuple[str, ...]:
    """Entries between semicolons, white space tidied."""
    return tuple(" ".join(entry.split()) for entry in text.split(";") if entry.strip())


FIRST_NAMES = _split("""
Anna; Ben; Clara; David; Emma; Felix; Grace; Henry; Iris; Jack; Kate; Leo; Mia; Noah; Olivia; Paul; Quinn; Rosa; Sam;
Tina; Uma; Victor; Wendy; Yusuf; Zoe; Lily; Max; Lucy; Tom; Sara; Oscar; Nina; Peter; Ruth; Simon; Maria; Luca; Amir;
Fatima; Chen; Mei; Raj; Priya; Kofi; Amina; Diego; Elena; Ivan; Sofia; Hugo; Ella; Jonas; Marta; Theo; Alice; Bruno;
Daisy; Eli; Freya; George; Hana; Ida; Jamal; Kenji; Layla; Milo; Nora; Otto; Pia; Remy; Stella; Timmy; Vera; Will
""")

ANIMALS = _split("""
cat; dog; rabbit; fox; bear; mouse; owl; duck; horse; cow; pig; sheep; goat; frog; turtle; lion; tiger; elephant;
monkey; giraffe; zebra; penguin; dolphin; whale; shark; snake; lizard; parrot; eagle; crow; sparrow; swan; bee;
butterfly; ant; spider; snail; hedgehog; squirrel; deer; wolf; kangaroo; koala; panda; camel; crocodile; octopus;
crab; seal; otter; beaver; bat; donkey; chicken; goose; peacock; hippo; rhino; cheetah; gorilla; ladybug; firefly;
worm; salmon; goldfish; raccoon; moose; badger; hamster; dragonfly; jellyfish; starfish; flamingo; ostrich
""")

CHARACTERS = _split("""
baker; farmer; teacher; doctor; fisherman; pilot; sailor; king; queen; prince; princess; wizard; dragon; robot; ghost;
giant; fairy; knight; pirate; painter; musician; carpenter; gardener; shepherd; librarian; astronaut; scientist;
nurse; postman; grandmother; grandfather; little girl; little boy; brave girl; shy boy; young inventor; old
clockmaker; cook; bus driver; shopkeeper; tailor; dancer; singer; firefighter; lighthouse keeper; snowman; scarecrow;
small cloud; lost puppy; lonely tree; toy soldier; magician; explorer; miner; woodcutter; beekeeper; train driver;
twin sisters
""")

PLACES = _split("""
forest; village; city; farm; castle; beach; island; mountain; river; lake; desert; school; library; garden; park;
market; kitchen; hospital; museum; zoo; circus; harbor; train station; airport; space station; cave; valley; meadow;
small town; big house; old mill; attic; cellar; playground; bakery; toy shop; lighthouse; bridge; swamp; jungle; snowy
hill; quiet street; boat; treehouse; barn; classroom; theater; bookshop; field of flowers; deep sea; moon
""")

OBJECTS = _split("""
ball; book; key; lamp; clock; bicycle; kite; boat; umbrella; hat; shoe; letter; map; box; ring; mirror; candle;
basket; blanket; cup; spoon; pencil; violin; drum; bell; ladder; wheel; coin; stone; feather; shell; seed; flower;
leaf; apple; cake; loaf of bread; red balloon; wooden horse; magic stone; golden key; silver bell; old photograph;
music box; telescope; compass; lantern; paintbrush; pair of glasses; toy car; teddy bear; puzzle; snow globe; rope;
hammer; needle; button; scarf; jar of honey; bag of marbles; notebook; flute; broken vase; secret door; paper plane;
treasure chest
""")

ADJECTIVES = _split("""
little; big; brave; shy; clever; lazy; kind; curious; lonely; happy; sad; hungry; tired; funny; old; young; tiny;
fast; slow; quiet; noisy; gentle; proud; greedy; honest; friendly; grumpy; sleepy; strong; wise; silly; careful; lost;
small
""")

FEELINGS = _split("""
happy; sad; angry; tired; lonely; worried; excited; nervous; bored; proud; scared; calm; confused; grateful; jealous;
disappointed; hopeful; stressed; surprised; embarrassed; homesick; curious; shy; relieved
""")

REASONS = _split("""
I lost my keys; my best friend moved away; I have an exam tomorrow; my dog is sick; I got a new job; it has been
raining all week; I had an argument with my brother; I start at a new school on Monday; I won a prize; my team lost
the game; I can't sleep at night; my grandmother is coming to visit; I broke my favorite cup; nobody called me on my
birthday; I have too much homework; I finished a big project; I am going on a trip; I forgot an appointment; I made a
mistake at work; I learned to ride a bicycle; my sister got married; I don't know what to cook; my plants are dying; I
have to speak in front of my class; I miss my family; I found a wallet on the street; the summer is over
""")

WISHES = _split("""
wants to fly; is afraid of the dark; cannot find the way home; loves to sing; wants to find a friend; has never seen
the sea; learns to share; helps a stranger; finds a hidden door; plants a seed; builds a boat; gets lost in the snow;
wants to be a painter; tells a lie; loses something precious; learns to swim; makes a big mistake; bakes a cake for
everyone; saves the village; meets a talking animal; goes on a long journey; cannot sleep; wants to see the stars;
keeps a secret; learns to say sorry; finds a map; wants to win a race; is too proud to ask for help; discovers music;
wakes up very small; forgets a promise; learns to be patient; rescues a bird; becomes a good friend; opens a shop
""")

LESSONS = _split("""
friendship; honesty; courage; patience; sharing; kindness; hard work; listening to others; not giving up; telling the
truth; helping others; being yourself; trust; forgiveness; gratitude; working together; being careful; curiosity
""")

EVENTS = _split("""
a birthday party; the first day of school; a storm; a picnic; a race; a wedding; a snow day; a festival; a journey by
train; a rainy afternoon; a power cut; a school play; a day at the beach; a camping trip; a visit to the zoo; a long
winter; a lost letter; a surprise; a big harvest; a night under the stars; a football match; a broken machine; a dream
""")

TOPICS = _split("""
gravity; photosynthesis; the water cycle; electricity; a rainbow; the solar system; the moon; the sun; a volcano; an
earthquake; a tornado; the wind; snow; lightning; the heart; the brain; the lungs; the skeleton; the stomach; blood;
muscles; sleep; the five senses; evolution; fossils; dinosaurs; a magnet; sound; light; heat; energy; a cell; an atom;
a molecule; oxygen; carbon dioxide; bacteria; a virus; vaccines; the food chain; an ecosystem; recycling; pollution;
climate; the seasons; the tides; the equator; a desert; a rainforest; the ocean; a glacier; a river; a map; time
zones; money; a bank; trade; democracy; a law; a city; a government; taxes; the internet; a computer; a computer
program; an algorithm; artificial intelligence; a battery; a robot; a telescope; a microscope; a calendar; history;
ancient Egypt; ancient Rome; the Middle Ages; the Renaissance; the Industrial Revolution; a museum; music; rhythm;
painting; poetry; a novel; grammar; a noun; a verb; an adjective; a metaphor; mathematics; a fraction; geometry; a
triangle; a circle; probability; an average; a prime number; multiplication; division; percentages; friendship;
happiness; courage; honesty; empathy; patience; respect; responsibility; teamwork; creativity; a habit; exercise; a
balanced diet; vitamins; protein; sugar; hygiene; first aid; a garden; soil; a seed; pollination; bees; birds;
mammals; reptiles; amphibians; insects; fish; migration; hibernation; camouflage; a nest; a forest; wood; glass;
paper; steel; plastic; cotton; a bridge; a train; an airplane; a bicycle; a boat; football; basketball; chess;
swimming; the Olympic Games; cooking; bread; cheese; tea; coffee; chocolate; rice; a library; a dictionary; a
newspaper; photography; film; theater; dance; a language; a holiday; a tradition; a proverb; a family; a neighbor; a
village; weather forecasts; clouds; fog; rain; a shadow; an echo
""")

PLURAL_TOPICS = _split("""
fossils; dinosaurs; muscles; bacteria; vaccines; taxes; percentages; vitamins; bees; birds; mammals; reptiles;
amphibians; insects; clouds; the lungs; the seasons; the tides; the five senses; time zones; the Middle Ages; the
Olympic Games
""")
"""Topics that ask for "are"."""

WHYS = _split("""
is the sky blue; do leaves fall in autumn; do we sleep; do cats purr; do birds fly south; is the sea salty; do we
yawn; do we dream; does ice float; do we have seasons; do stars twinkle; do we need water; do plants need light; is
exercise good for us; do we brush our teeth; do people laugh; do dogs wag their tails; does the moon change its shape;
do we celebrate birthdays; is reading important; do we cry; do bees make honey; do volcanoes erupt; do onions make us
cry; do magnets stick to iron; do people learn languages; does bread rise; do we wear clothes; do we feel cold; is
honesty important; do zebras have stripes; do trees have rings; do we have day and night; is it important to say thank
you; do we get hungry; do cars need fuel; does hair turn gray; do fish have gills; do spiders make webs; do snakes
shed their skin; should we save water; do we need friends; do people keep pets; does metal rust; do mirrors show our
face; do people tell stories; do clouds look white; does the wind blow; do we have fingerprints; do we need rules
""")

MACHINES = _split("""
a bicycle; a clock; a refrigerator; a washing machine; a telephone; a camera; a light bulb; a car engine; an airplane;
a submarine; a windmill; a solar panel; a microwave oven; a vacuum cleaner; a printer; a radio; a thermometer; a
compass; a battery; a lock; an elevator; a steam engine; a helicopter; a hot air balloon; a piano; a guitar; a zipper;
a toaster; a computer; a telescope; a pair of scissors; a pulley; a lever; a sailboat; a parachute; a dam; a search
engine; an umbrella
""")

TASKS = _split("""
make a cup of tea; boil an egg; bake a simple cake; make a sandwich; cook rice; wash my hands properly; plant a tree;
grow tomatoes; take care of a cat; take care of a puppy; learn a new language; write a letter; write a short story;
read more books; make new friends; say sorry; save money; clean my room; pack a suitcase; ride a bicycle; learn to
swim; draw a cat; paint a wall; fold a paper plane; build a snowman; tie a tie; sew on a button; remove a stain; study
for a test; remember new words; sleep better; wake up early; stop worrying; stay calm; prepare for an interview; give
a good speech; choose a book; plan a trip; plan a birthday party; make a salad; make soup; make pancakes; make
lemonade; water plants; feed birds in winter; keep bees; start a garden; learn to play the guitar; learn to sing; take
good photos; read a map; use a dictionary; solve a puzzle; play chess; teach a dog to sit; clean a window; iron a
shirt; wrap a gift; save energy at home; use less plastic; eat healthier; start running; treat a small cut; cross a
street safely; find a hobby; write a poem; tell a good joke; listen better; help a sad friend; thank a teacher;
organize my desk; change a tire
""")

GOALS = _split("""
staying healthy; learning faster; sleeping well; saving money; making friends; writing well; public speaking; being
kind; keeping a house clean; traveling with children; cooking at home; growing vegetables; learning mathematics;
reading more; working in a team; using time well; protecting nature; staying calm; having a good day; caring for a
pet; being on time; drawing; learning music; hiking; camping; a good conversation; solving a quarrel; a picnic; a
quiet evening; a job
""")

CONTRASTS = _split("""
a cat and a dog; a lake and a river; a frog and a toad; weather and climate; a planet and a star; a moth and a
butterfly; a lion and a tiger; a town and a city; a fruit and a vegetable; a novel and a poem; fear and courage; a
violin and a guitar; tea and coffee; summer and winter; a boat and a ship; a crocodile and an alligator; a question
and an answer; a verb and a noun; hot and cold water; the sun and the moon; an insect and a spider; a mammal and a
reptile; butter and cheese; a hill and a mountain; a sea and an ocean; a friend and a stranger; a job and a hobby; a
bus and a train; a law and a rule; speed and distance; mass and weight; a circle and a square; a solid and a liquid; a
horse and a donkey; a rabbit and a hare; a crow and a raven; wood and metal; listening and hearing; needs and wants; a
wolf and a dog
""")

CATEGORIES = _split("""
fruits; vegetables; colors; animals that live in the sea; animals that can fly; farm animals; musical instruments;
sports; things in a kitchen; things in a classroom; jobs; hobbies; kinds of weather; planets; countries in Europe;
countries in Asia; countries in Africa; rivers; big cities; languages; tools; trees; flowers; insects; birds; pets;
breakfast foods; drinks; desserts; board games; ways to relax; ways to be kind; ways to save water; shapes; clothes
for winter; things to take on a trip; vehicles; rooms in a house; parts of the body; feelings; holidays; school
subjects
""")

SCENES = _split("""
a sunset at the sea; a busy market; a quiet forest; a snowy morning; a thunderstorm; a small cottage; a summer garden;
a train journey; a rainy street at night; a mountain village; a birthday cake; your perfect day; an old library; a
starry night; a farm in the morning; a crowded bus; a harbor with boats; a walk in autumn; a warm kitchen; a desert at
noon; a frozen lake; a castle on a hill; a cat sleeping by the fire; a school playground; a river in spring; an empty
beach; a circus tent; a bakery in the morning; an underwater world; a foggy bridge; a city from above
""")

FOODS = _split("""
an apple; a banana; bread; rice; soup; pasta; pizza; cheese; a carrot; a potato; an egg; honey; yogurt; a salad; cake;
ice cream; an orange; a tomato; beans; nuts; fish; milk; chocolate; butter; a sandwich; pancakes; porridge; a pear;
strawberries; grapes; an onion; garlic; mushrooms; spinach; pumpkin; corn; noodles; jam; cookies; a lemon
""")

EVERYDAY = _split("""
the weather; your favorite color; a good book; a walk in the park; weekend plans; learning to cook; a new neighbor; a
lost umbrella; the best season; what to eat tonight; a trip to the sea; an old friend; a noisy street; a new bicycle;
music; a good night's sleep; saving money; a funny dream; football; gardening; a birthday present; homework; pets; a
late bus
""")

COUNTRIES = _split("""
France; Germany; Italy; Spain; Portugal; Japan; China; India; Brazil; Canada; Mexico; Egypt; Kenya; Australia; Norway;
Sweden; Greece; Turkey; Russia; Argentina; Peru; Chile; Morocco; Nigeria; South Africa; Thailand; Vietnam; Indonesia;
Iceland; Ireland; Poland; Austria; Switzerland; the Netherlands; Finland; Cuba; New Zealand; Ethiopia; Nepal; Mongolia
""")

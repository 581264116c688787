"""Facts in tables, written for this project: answers that should be right more often than the teacher's."""

from __future__ import annotations

__all__ = [
    "BABIES",
    "CAPITALS",
    "COLOURS",
    "CONTINENTS",
    "DAYS",
    "MEANINGS",
    "MONTHS",
    "NUMBERS",
    "OPPOSITES",
    "ORDINALS",
    "PAST_TENSES",
    "QUESTIONS",
    "SOUNDS",
]


def _pairs(text: str) -> dict[str, str]:
    """ "key: value; key: value" as a table."""
    entries = (entry.partition(":") for entry in text.split(";") if entry.strip())
    return {" ".join(key.split()): " ".join(value.split()) for key, _, value in entries}


def _words(text: str) -> tuple[str, ...]:
    """Words between spaces."""
    return tuple(text.split())


CAPITALS = _pairs("""
France: Paris; Germany: Berlin; Italy: Rome; Spain: Madrid; Portugal: Lisbon; England: London; Ireland: Dublin;
Scotland: Edinburgh; Norway: Oslo; Sweden: Stockholm; Finland: Helsinki; Denmark: Copenhagen; Iceland: Reykjavik;
Poland: Warsaw; Austria: Vienna; Switzerland: Bern; Belgium: Brussels; the Netherlands: Amsterdam; Greece: Athens;
Turkey: Ankara; Russia: Moscow; Ukraine: Kyiv; Hungary: Budapest; Romania: Bucharest; Bulgaria: Sofia; Croatia:
Zagreb; Serbia: Belgrade; the Czech Republic: Prague; Japan: Tokyo; China: Beijing; India: New Delhi; South Korea:
Seoul; Thailand: Bangkok; Vietnam: Hanoi; Indonesia: Jakarta; the Philippines: Manila; Nepal: Kathmandu; Mongolia:
Ulaanbaatar; Pakistan: Islamabad; Bangladesh: Dhaka; Iran: Tehran; Iraq: Baghdad; Saudi Arabia: Riyadh; Egypt: Cairo;
Kenya: Nairobi; Ethiopia: Addis Ababa; Morocco: Rabat; Tunisia: Tunis; Ghana: Accra; Nigeria: Abuja; Senegal: Dakar;
Uganda: Kampala; Canada: Ottawa; the United States: Washington, D.C.; Mexico: Mexico City; Cuba: Havana; Brazil:
Brasilia; Argentina: Buenos Aires; Chile: Santiago; Peru: Lima; Colombia: Bogota; Venezuela: Caracas; Ecuador: Quito;
Uruguay: Montevideo; Australia: Canberra; New Zealand: Wellington
""")

CONTINENTS = _pairs("""
France: Europe; Germany: Europe; Italy: Europe; Spain: Europe; Portugal: Europe; Norway: Europe; Sweden: Europe;
Finland: Europe; Poland: Europe; Greece: Europe; Austria: Europe; Ireland: Europe; Japan: Asia; China: Asia; India:
Asia; Thailand: Asia; Vietnam: Asia; Nepal: Asia; Mongolia: Asia; South Korea: Asia; Egypt: Africa; Kenya: Africa;
Morocco: Africa; Ghana: Africa; Nigeria: Africa; Ethiopia: Africa; South Africa: Africa; Canada: North America;
Mexico: North America; Cuba: North America; the United States: North America; Brazil: South America; Argentina: South
America; Chile: South America; Peru: South America; Colombia: South America
""")

OPPOSITES = _pairs("""
hot: cold; big: small; tall: short; fast: slow; old: young; new: old; happy: sad; light: dark; day: night; up: down;
left: right; open: closed; full: empty; hard: soft; heavy: light; high: low; long: short; near: far; early: late;
rich: poor; strong: weak; thick: thin; wet: dry; clean: dirty; loud: quiet; good: bad; right: wrong; easy: difficult;
first: last; begin: end; buy: sell; give: take; win: lose; love: hate; push: pull; black: white; warm: cool; deep:
shallow; wide: narrow; sharp: blunt; sweet: sour; brave: afraid; friend: enemy; inside: outside; above: below; before:
after; always: never; many: few; true: false; asleep: awake; summer: winter; north: south; east: west; laugh: cry;
remember: forget; arrive: leave; alive: dead; rough: smooth; cheap: expensive; ugly: beautiful
""")

SOUNDS = _pairs("""
cat: meow; dog: woof; cow: moo; sheep: baa; duck: quack; pig: oink; horse: neigh; lion: roar; bee: buzz; snake: hiss;
owl: hoot; frog: ribbit; mouse: squeak; chicken: cluck; crow: caw; wolf: howl; donkey: hee-haw; rooster:
cock-a-doodle-doo
""")

BABIES = _pairs("""
cat: kitten; dog: puppy; cow: calf; horse: foal; sheep: lamb; pig: piglet; goat: kid; duck: duckling; chicken: chick;
bear: cub; lion: cub; frog: tadpole; deer: fawn; kangaroo: joey; goose: gosling; swan: cygnet; butterfly: caterpillar;
elephant: calf; owl: owlet; fox: kit
""")

COLOURS = _pairs("""
the sky on a clear day: blue; grass: green; snow: white; a ripe banana: yellow; blood: red; coal: black; an orange:
orange; a lemon: yellow; milk: white; a tomato: red; a carrot: orange; chocolate: brown; a leaf in summer: green; the
sun at sunset: orange or red; salt: white; a strawberry: red; an elephant: gray; a crow: black; a frog: green; gold:
yellow
""")

PAST_TENSES = _pairs("""
go: went; see: saw; eat: ate; run: ran; come: came; take: took; give: gave; write: wrote; sing: sang; swim: swam;
think: thought; buy: bought; bring: brought; catch: caught; find: found; fly: flew; forget: forgot; grow: grew; hear:
heard; know: knew; make: made; read: read; ride: rode; say: said; sleep: slept; speak: spoke; stand: stood; teach:
taught; tell: told; walk: walked; play: played; jump: jumped; begin: began; drink: drank; drive: drove; fall: fell;
feel: felt
""")

MEANINGS = _pairs("""
tiny: very small; enormous: very big; ancient: very old; brave: not afraid to do something dangerous or difficult;
shy: afraid to meet or talk to people; generous: happy to give things to others; honest: telling the truth; curious:
wanting to know or learn more; lonely: sad because you are alone; hungry: needing to eat; thirsty: needing to drink;
exhausted: very tired; furious: very angry; delighted: very happy; silent: without any sound; fragile: easy to break;
rapid: very fast; annual: happening once a year; identical: exactly the same; rare: not often seen or found; fluent:
able to speak a language easily; humid: having a lot of water in the air; edible: safe to eat; transparent: letting
light through, so that you can see what is behind; stubborn: not willing to change your mind; patient: able to wait
calmly; polite: having good manners; frequent: happening often; nocturnal: active at night; extinct: no longer living
anywhere on Earth
""")

DAYS = ("Monday", "Tuesday", "Wednesday", "Thursday", "Friday", "Saturday", "Sunday")
MONTHS = (
    "January",
    "February",
    "March",
    "April",
    "May",
    "June",
    "July",
    "August",
    "September",
    "October",
    "November",
    "December",
)
ORDINALS = _words("first second third fourth fifth sixth seventh eighth ninth tenth eleventh twelfth")
NUMBERS = _words(
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen seventeen "
    "eighteen nineteen twenty"
)

QUESTIONS: dict[str, str] = {
    "How many days are in a week?": "There are seven days in a week.",
    "How many months are in a year?": "There are twelve months in a year.",
    "How many hours are in a day?": "There are 24 hours in a day.",
    "How many minutes are in an hour?": "There are 60 minutes in an hour.",
    "How many seconds are in a minute?": "There are 60 seconds in a minute.",
    "How many days are in a year?": "There are 365 days in a year, and 366 in a leap year.",
    "How many legs does a spider have?": "A spider has eight legs.",
    "How many legs does an insect have?": "An insect has six legs.",
    "How many legs does a dog have?": "A dog has four legs.",
    "How many arms does an octopus have?": "An octopus has eight arms.",
    "How many wheels does a bicycle have?": "A bicycle has two wheels.",
    "How many sides does a triangle have?": "A triangle has three sides.",
    "How many sides does a square have?": "A square has four sides of the same length.",
    "How many letters are in the English alphabet?": "There are 26 letters in the English alphabet.",
    "How many continents are there?": "There are seven continents: Africa, Antarctica, Asia, Australia, Europe, "
    "North America and South America.",
    "How many planets are in the solar system?": "There are eight planets in the solar system.",
    "What are the four seasons?": "The four seasons are spring, summer, autumn and winter.",
    "What are the primary colors?": "The primary colors are red, yellow and blue.",
    "What are the five senses?": "The five senses are sight, hearing, smell, taste and touch.",
    "Which planet is closest to the Sun?": "Mercury is the planet closest to the Sun.",
    "Which planet is the largest?": "Jupiter is the largest planet in the solar system.",
    "Which planet do we live on?": "We live on the planet Earth.",
    "What is the largest ocean?": "The largest ocean is the Pacific Ocean.",
    "What is the largest animal on Earth?": "The largest animal on Earth is the blue whale.",
    "What is the tallest animal?": "The tallest animal is the giraffe.",
    "What is the fastest land animal?": "The fastest land animal is the cheetah.",
    "What is the highest mountain in the world?": "The highest mountain in the world is Mount Everest.",
    "What is the largest country in the world?": "The largest country in the world by area is Russia.",
    "At what temperature does water boil?": "Water boils at 100 degrees Celsius at sea level.",
    "At what temperature does water freeze?": "Water freezes at 0 degrees Celsius.",
    "What is water made of?": "Water is made of hydrogen and oxygen.",
    "What gas do we breathe in to live?": "We need oxygen, which is a part of the air we breathe.",
    "What do plants need to grow?": "Plants need light, water, air and nutrients from the soil.",
    "What do bees make?": "Bees make honey and wax.",
    "What do cows give us?": "Cows give us milk.",
    "What pumps blood through the body?": "The heart pumps blood through the body.",
    "Where does the Sun rise?": "The Sun rises in the east.",
    "Where does the Sun set?": "The Sun sets in the west.",
    "What is the Sun?": "The Sun is a star at the center of our solar system. It gives us light and warmth.",
    "What is the Moon?": "The Moon is a round body of rock that travels around the Earth.",
    "What is frozen water called?": "Frozen water is called ice.",
    "What do we call a baby's first teeth?": "They are called milk teeth.",
    "Who wrote Romeo and Juliet?": "William Shakespeare wrote Romeo and Juliet.",
    "Who painted the Mona Lisa?": "Leonardo da Vinci painted the Mona Lisa.",
    "Who was the first person on the Moon?": "Neil Armstrong was the first person to walk on the Moon, in 1969.",
    "What language do people speak in Brazil?": "People in Brazil speak Portuguese.",
    "What language do people speak in Mexico?": "People in Mexico speak Spanish.",
    "What language do people speak in Austria?": "People in Austria speak German.",
    "What do you use to cut paper?": "You use scissors to cut paper.",
    "What do you use to tell the time?": "You use a clock or a watch to tell the time.",
    "What do you wear on your feet?": "You wear socks and shoes on your feet.",
    "Is a whale a fish?": "No, a whale is a mammal. It breathes air and feeds its young with milk.",
    "Is a spider an insect?": "No, a spider is not an insect. It has eight legs, and insects have six.",
    "Is a tomato a fruit?": "Yes, to a scientist a tomato is a fruit, though we cook it like a vegetable.",
    "Can penguins fly?": "No, penguins cannot fly, but they swim very well.",
    "Can fish live without water?": "No, fish need water to live and to breathe through their gills.",
    "Is the Earth flat?": "No, the Earth is round like a ball.",
    "Does the Sun go around the Earth?": "No, the Earth goes around the Sun, once in a year.",
}

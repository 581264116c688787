"""Plain knowledge in tables, written for this project: animals, and what things are."""

from __future__ import annotations

__all__ = ["ANIMAL_FACTS", "DEFINITIONS"]


def _rows(text: str) -> dict[str, tuple[str, ...]]:
    """ "name | cell | cell" lines as a table."""
    out = {}
    for line in text.strip().splitlines():
        name, *cells = (cell.strip() for cell in line.split("|"))
        out[name] = tuple(cells)
    return out


ANIMAL_FACTS = _rows("""
cat | a mammal | with people in houses, or outside around farms and towns | meat, fish and mice | soft fur and whiskers
dog | a mammal | with people all over the world | meat and other food that people give them | a very good nose
rabbit | a mammal | in meadows and woods, in burrows under the ground | grass, leaves and vegetables | long ears
fox | a mammal | in forests, fields and even cities | mice, birds, insects and berries | a bushy tail
bear | a mammal | in forests and mountains | berries, fish, roots and honey | thick fur and strong claws
mouse | a mammal | in fields, woods and houses | seeds, grain and fruit | a long thin tail
owl | a bird | in forests and old buildings | mice, small birds and insects | big eyes that see well at night
duck | a bird | on lakes, ponds and rivers | water plants, insects and seeds | webbed feet
horse | a mammal | on farms and grassy plains | grass, hay and oats | long strong legs
cow | a mammal | on farms and pastures | grass and hay | a stomach with four parts
pig | a mammal | on farms, and wild ones in forests | roots, vegetables and grain | a round flat nose
sheep | a mammal | on farms and grassy hills | grass | thick wool
goat | a mammal | on farms and in rocky mountains | grass, leaves and shrubs | horns and a beard
frog | an amphibian | near ponds, lakes and streams | flies and other insects | long back legs for jumping
turtle | a reptile | in water or on land | plants, insects and small fish | a hard shell
lion | a mammal | on the grasslands of Africa | zebras, antelopes and other animals | a mane, if it is a male
tiger | a mammal | in the forests of Asia | deer and wild pigs | orange fur with black stripes
elephant | a mammal | in Africa and Asia | grass, leaves, fruit and bark | a long trunk and big ears
monkey | a mammal | in warm forests | fruit, leaves, nuts and insects | clever hands
giraffe | a mammal | on the grasslands of Africa | leaves from tall trees | a very long neck
zebra | a mammal | on the grasslands of Africa | grass | black and white stripes
penguin | a bird | on the cold coasts of the southern half of the world | fish, squid and krill | wings for swimming
dolphin | a mammal | in the sea | fish and squid | a smooth body and a clever mind
whale | a mammal | in the ocean | krill, fish or squid | a huge body
shark | a fish | in the ocean | fish, seals and other sea animals | many sharp teeth
snake | a reptile | in forests, deserts, grass and water | mice, birds, eggs and frogs | a long body without legs
lizard | a reptile | in warm and dry places | insects and plants | a long tail and scales
parrot | a bird | in warm forests | seeds, nuts and fruit | bright feathers and a curved beak
eagle | a bird | in mountains and near lakes | fish, rabbits and other small animals | very sharp eyes
crow | a bird | in fields, woods and cities | seeds, insects, fruit and leftovers | black feathers
swan | a bird | on lakes and rivers | water plants | a long curved neck
bee | an insect | in hives | nectar and pollen from flowers | a sting and two pairs of wings
butterfly | an insect | in gardens, meadows and forests | nectar from flowers | colorful wings
ant | an insect | in large nests in the ground | seeds, sweet juices and other insects | great strength for its size
spider | an arachnid | in gardens, woods and houses | insects | eight legs
snail | a mollusk | in gardens and damp places | leaves and other plants | a shell on its back
hedgehog | a mammal | in gardens, hedges and woods | insects, worms and snails | sharp spines
squirrel | a mammal | in trees | nuts, seeds and buds | a bushy tail
deer | a mammal | in forests and meadows | grass, leaves and buds | antlers, if it is a male
wolf | a mammal | in forests and mountains, in packs | deer and other animals | sharp teeth and a loud howl
kangaroo | a mammal | in Australia | grass and leaves | a pouch for its young and strong back legs
koala | a mammal | in the eucalyptus trees of Australia | eucalyptus leaves | gray fur and a big nose
panda | a mammal | in the bamboo forests of China | bamboo | black and white fur
camel | a mammal | in deserts | grass and desert plants | one or two humps that store fat
crocodile | a reptile | in warm rivers and swamps | fish, birds and other animals | a long mouth full of teeth
octopus | a mollusk | in the sea, among rocks | crabs, shrimp and fish | eight arms with suckers
crab | a crustacean | on beaches and in the sea | plants and small sea animals | two strong claws
seal | a mammal | on cold coasts and in the sea | fish and squid | flippers and thick fat
otter | a mammal | in rivers and along coasts | fish, crabs and shellfish | thick waterproof fur
beaver | a mammal | in rivers and lakes, where it builds dams | bark, twigs and leaves | a flat tail and strong teeth
bat | a mammal | in caves, trees and attics | insects or fruit | wings of skin
chicken | a bird | on farms | grain, seeds and insects | a red comb
hippo | a mammal | in the rivers and lakes of Africa | grass | a huge mouth
rhino | a mammal | in Africa and Asia | grass and leaves | one or two horns on its nose
cheetah | a mammal | on the grasslands of Africa | gazelles and other small animals | spots and very fast legs
gorilla | a mammal | in the forests of Africa | leaves, stems and fruit | strong arms
ladybug | an insect | in gardens and fields | tiny insects called aphids | red wings with black spots
firefly | an insect | in warm meadows and woods | snails, worms or nectar | a light in its body
salmon | a fish | in rivers and in the sea | small fish, shrimp and insects | the strength to swim up rivers
hamster | a mammal | in dry fields, and with people as a pet | seeds, grain and vegetables | pouches in its cheeks
flamingo | a bird | at warm shallow lakes | shrimp and algae | pink feathers and long legs
ostrich | a bird | on the grasslands of Africa | plants, seeds and insects | long legs, but wings that cannot fly
""")

DEFINITIONS = _rows("""
gravity | Gravity is the force that pulls things toward each other. It keeps us on the ground.
photosynthesis | Photosynthesis is how plants make food from light, water and carbon dioxide. They give off oxygen.
the water cycle | The water cycle is the way water moves: it rises as vapor, forms clouds and falls as rain or snow.
electricity | Electricity is a form of energy that comes from moving charges. It gives us light and runs our machines.
a rainbow | A rainbow is an arc of colors in the sky. It appears when sunlight shines through drops of rain.
the solar system | The solar system is the Sun and everything that travels around it, such as the eight planets.
a volcano | A volcano is an opening in the Earth through which hot melted rock, ash and gas come out.
an earthquake | An earthquake is a shaking of the ground that happens when large pieces of rock move deep below us.
a tornado | A tornado is a fast spinning column of air that reaches from a storm cloud to the ground.
the wind | The wind is moving air. It blows because the Sun warms some places more than others.
snow | Snow is frozen water that falls from clouds as small white crystals of ice.
lightning | Lightning is a large spark of electricity in a storm, between clouds or between a cloud and the ground.
the heart | The heart is a muscle in your chest that pumps blood through the whole body.
the brain | The brain is the part of the body in your head that thinks, remembers and controls what you do.
the lungs | The lungs are two parts of the body in your chest that you breathe with. They bring oxygen into the blood.
the skeleton | The skeleton is all the bones of the body together. It holds us up and protects the heart and lungs.
the stomach | The stomach is the part of the body where the food that you have eaten is broken down.
sleep | Sleep is the time when the body and the mind rest. It helps us to grow, to heal and to remember.
fossils | Fossils are the remains or prints of plants and animals that lived a very long time ago, kept in stone.
dinosaurs | Dinosaurs were reptiles that lived on Earth millions of years ago. Today's birds come from them.
a magnet | A magnet is a piece of metal that pulls iron toward itself.
sound | Sound is what we hear. It is made of tiny quick movements of the air.
light | Light is a form of energy that lets us see. Most of our light comes from the Sun.
a cell | A cell is the smallest part of a living thing. All plants and animals are made of cells.
an atom | An atom is a tiny piece of matter. Everything around us is made of atoms.
oxygen | Oxygen is a gas in the air. People and animals need it to breathe.
bacteria | Bacteria are living things so small that we cannot see them. Some make us ill, and many are useful.
a virus | A virus is a tiny thing that can make us ill. It needs the cells of a living thing to make copies of itself.
vaccines | Vaccines are medicines that teach the body to fight an illness before it comes.
the food chain | The food chain shows who eats whom: plants are eaten by animals, and those are eaten by other animals.
recycling | Recycling means using old materials such as paper, glass and metal again to make new things.
pollution | Pollution is dirt or harmful stuff in the air, in water or in the ground.
the seasons | The seasons are spring, summer, autumn and winter. They come because the Earth's axis is tilted.
the tides | The tides are the rise and fall of the sea. They are caused mostly by the pull of the Moon.
the equator | The equator is a line on maps around the middle of the Earth, halfway between the two poles.
a desert | A desert is a very dry place where it hardly ever rains.
a rainforest | A rainforest is a thick, warm and wet forest where very many plants and animals live.
the ocean | The ocean is the huge body of salt water that covers most of the Earth.
a glacier | A glacier is a large mass of ice that moves very slowly down a mountain or over land.
a river | A river is a large stream of fresh water that flows to a lake or to the sea.
a map | A map is a drawing that shows where places are.
money | Money is what we use to pay for things. It can be coins, paper notes or numbers at a bank.
a bank | A bank is a place that keeps people's money safe and lends money to others.
democracy | Democracy is a form of government in which the people choose their leaders by voting.
a law | A law is a rule that everybody in a country must follow.
the internet | The internet is a network that connects computers all over the world so that they can share information.
a computer | A computer is a machine that stores information and follows instructions to solve tasks.
an algorithm | An algorithm is a list of clear steps for solving a problem.
a battery | A battery is a small store of energy that gives electricity to things like phones and flashlights.
a robot | A robot is a machine that can do work by itself by following a program.
a telescope | A telescope is a tool that makes things that are far away, like stars, look closer.
a microscope | A microscope is a tool that makes very small things look big.
a noun | A noun is a word for a person, a place or a thing, such as "teacher", "city" or "apple".
a verb | A verb is a word for doing or being, such as "run", "think" or "is".
an adjective | An adjective is a word that describes a noun, such as "big", "red" or "happy".
a fraction | A fraction is a part of a whole. One half and three quarters are fractions.
a triangle | A triangle is a shape with three straight sides and three corners.
a circle | A circle is a round shape. Every point on it is equally far from the center.
multiplication | Multiplication is adding the same number again and again: 3 times 4 means 4 + 4 + 4, which is 12.
friendship | Friendship is a close bond between people who like, trust and help each other.
courage | Courage means doing what is right or needed even when you are afraid.
honesty | Honesty means telling the truth and not cheating.
patience | Patience means waiting calmly without getting angry.
empathy | Empathy means understanding how another person feels.
pollination | Pollination is the moving of pollen from flower to flower, often by bees. After it plants can make seeds.
mammals | Mammals are animals with hair or fur that feed their young with milk. People, dogs and whales are mammals.
reptiles | Reptiles are animals with dry scales, such as snakes, lizards and turtles. Most of them lay eggs.
amphibians | Amphibians are animals that live in water when young and often on land later, such as frogs.
insects | Insects are small animals with six legs, such as ants, bees and butterflies.
migration | Migration is a long journey that animals make, often each year, to find food or warmer places.
hibernation | Hibernation is a long deep sleep through the winter that saves energy when there is little food.
camouflage | Camouflage means looking like the things around you so that nobody sees you. Many animals use it.
a library | A library is a place where many books are kept and where people can read and borrow them.
a dictionary | A dictionary is a book that lists words and tells what they mean.
clouds | Clouds are made of many tiny drops of water or bits of ice that float in the air.
fog | Fog is a cloud that lies close to the ground, so that we cannot see far.
rain | Rain is water that falls from the clouds in drops.
a shadow | A shadow is the dark shape that appears where something blocks the light.
an echo | An echo is a sound that comes back to us after it has hit a wall or a mountain.
""")

"""Makes a task to train on: a voice assistant's commands, each answered by one line of JSON with its intent and slots.

    python training/voice_commands.py --split train --rows 4000 --seed 0 --out train.jsonl
    python training/voice_commands.py --split test --rows 200

The task is narrow and its answers are structured, as in TOPv2 (Chen et al., 2020), but everything is made up here, so
nothing is downloaded. Every line of the output is a row:

    {"prompt": [{"role": "system", "content": "Answer with …"}, {"role": "user", "content": "wake me up at 7:30 am"}],
     "completion": "{\\"intent\\": \\"set_alarm\\", \\"slots\\": {\\"time\\": \\"7:30 am\\"}}"}

Slot values are copied from the command as they were spoken; slots that a command does not mention are absent. The
splits share the intents, but neither a phrasing nor a value of an open slot: names, places, titles, messages, numbers
and times of validation and test never occur in train. The same split, rows and seed always give the same rows.
"""

from __future__ import annotations

import argparse
import itertools
import json
import random
import re
import sys
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from layerskip.program import run_program

SPLITS = ("train", "validation", "test")
SYSTEM = "Answer with one line of JSON: the intent of the command and its slots."


# --- Phrasings -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Intent:
    """An intent: its slots, in the order of the answer's keys, and its phrasings in each split, one a line.

    `{time}` in a phrasing is the slot `time`, filled from the pool `time`; `{date:weekday}` is the slot `date`, filled
    from the pool `weekday`. Two slots that a phrasing fills from the same pool get different values.
    """

    slots: tuple[str, ...]
    train: str
    validation: str
    test: str

    def phrasings(self, split: str) -> list[str]:
        """Returns the phrasings of a split."""
        text: str = {"train": self.train, "validation": self.validation, "test": self.test}[split]
        return [line.strip() for line in text.strip().splitlines()]


INTENTS: dict[str, Intent] = {
    "set_alarm": Intent(
        slots=("time", "date"),
        train="""
            set an alarm for {time}
            wake me up at {time}
            set an alarm for {time} {date:relative_day}
            wake me up {date:relative_day} at {time}
            i need an alarm at {time} on {date:weekday}
            please set my alarm to {time}
            can you wake me at {time} on {date:calendar_day}
            new alarm for {time}
            alarm at {time} {date:relative_day} please
            make sure i am awake by {time}
            on {date:weekday} i have to get up at {time}
        """,
        validation="""
            get me out of bed at {time}
            could you put an alarm on for {date:relative_day} at {time}
            add an alarm on {date:calendar_day} for {time}
        """,
        test="""
            i want to be woken up at {time}
            {date:relative_day} ring the alarm at {time}
            schedule a wake up alarm for {time} on {date:weekday}
        """,
    ),
    "cancel_alarm": Intent(
        slots=("time", "date"),
        train="""
            cancel my {time} alarm
            delete the alarm at {time}
            turn off the alarm for {time}
            cancel all my alarms
            remove the {time} alarm on {date:weekday}
            i do not need the alarm at {time} {date:relative_day}
            please delete my alarm for {date:relative_day}
            switch off every alarm
            no alarm on {date:weekday} please
            get rid of the alarm set for {time}
            cancel the alarm on {date:calendar_day}
        """,
        validation="""
            drop my alarm at {time}
            stop the {time} alarm from going off {date:relative_day}
            clear all alarms
        """,
        test="""
            take away the alarm i set for {time}
            forget about the {time} alarm on {date:weekday}
            delete every alarm i have
        """,
    ),
    "set_timer": Intent(
        slots=("duration", "label"),
        train="""
            set a timer for {duration}
            start a timer for {duration}
            {duration} timer please
            count down {duration}
            set a timer for {duration} for the {label:dish}
            start a {label:chore} timer for {duration}
            time {duration} for me
            give me {duration} on the timer
            i need a timer for {duration}
            can you start a countdown of {duration}
            new timer called {label:chore} for {duration}
        """,
        validation="""
            put {duration} on the clock
            let me know when {duration} have passed
            begin a timer of {duration} for the {label:dish}
        """,
        test="""
            run a timer that lasts {duration}
            tell me once {duration} are over
            create a {label:chore} timer of {duration}
        """,
    ),
    "check_timer": Intent(
        slots=("label",),
        train="""
            how much time is left
            how long is left on the timer
            check my timer
            how long until the timer ends
            is the timer done yet
            how much longer on the {label:chore} timer
            what does the timer say
            when does the {label:chore} timer go off
            how many minutes are left on my timer
            time left on the timer for the {label:dish}
            check the timer for the {label:dish}
        """,
        validation="""
            show me how much is left on the countdown
            is the {label:chore} timer still running
            when will my timer be finished
        """,
        test="""
            what is remaining on the timer
            is there time left on the {label:chore} timer
            how far along is the timer for the {label:dish}
        """,
    ),
    "create_reminder": Intent(
        slots=("task", "time", "date"),
        train="""
            remind me to {task}
            remind me to {task} at {time}
            remind me {date:relative_day} to {task}
            set a reminder to {task} on {date:weekday}
            remind me at {time} {date:relative_day} to {task}
            do not let me forget to {task}
            i have to {task} at {time} so remind me
            add a reminder to {task} on {date:calendar_day}
            please remind me on {date:weekday} to {task}
            create a reminder for {time} to {task}
            can you remind me to {task} on {date:weekday} at {time}
        """,
        validation="""
            i should {task} {date:relative_day} so please remind me
            new reminder to {task} at {time} on {date:calendar_day}
            make sure i remember to {task}
        """,
        test="""
            nudge me at {time} to {task}
            put down a reminder for {date:relative_day} to {task}
            help me remember to {task} on {date:weekday}
        """,
    ),
    "get_weather": Intent(
        slots=("city", "date"),
        train="""
            what's the weather in {city}
            what is the weather like {date:relative_day}
            how is the weather in {city} {date:relative_day}
            will it rain in {city} on {date:weekday}
            do i need an umbrella {date:relative_day}
            weather forecast for {city}
            give me the forecast for {date:weekday}
            is it going to be sunny in {city} {date:relative_day}
            how cold is it in {city}
            what's the temperature outside
            will it snow on {date:calendar_day} in {city}
        """,
        validation="""
            tell me the weather for {city} on {date:weekday}
            how warm will it be {date:relative_day}
            is it windy in {city}
        """,
        test="""
            should i expect storms in {city} {date:relative_day}
            i want the weather report for {city}
            {date:relative_day} in {city} will it be hot
        """,
    ),
    "play_music": Intent(
        slots=("song", "artist", "genre"),
        train="""
            play the song {song}
            play {song} by {artist}
            play some {genre}
            put on some {genre} music
            i want to hear the song {song}
            play something by {artist}
            play {genre} songs by {artist}
            start the track {song} by {artist}
            can you play music from {artist}
            i am in the mood for {genre}
            listen to {song} by {artist}
        """,
        validation="""
            let me hear {song} by {artist}
            shuffle songs by {artist}
            how about some {genre} music from {artist}
        """,
        test="""
            i would like to listen to the song {song}
            put {song} by {artist} on
            turn on some {genre} by {artist}
        """,
    ),
    "stop_music": Intent(
        slots=(),
        train="""
            stop the music
            pause the music
            stop playing
            pause this song
            music off
            turn off the music
            please stop the song
            pause playback
            be quiet and stop the music
            end the music now
            can you pause the track
        """,
        validation="""
            halt the music
            no more music please
            could you stop that song
        """,
        test="""
            cut the music
            i do not want any music right now
            put the song on pause
        """,
    ),
    "skip_song": Intent(
        slots=(),
        train="""
            skip this song
            next song
            play the next track
            skip
            i do not like this song
            go to the next song
            skip ahead to the next one
            next track please
            can you skip this track
            change the song
            jump to the next song
        """,
        validation="""
            move on to the next track
            let us hear a different song
            skip the current song
        """,
        test="""
            on to the next tune
            play another song instead
            i have had enough of this track
        """,
    ),
    "navigate": Intent(
        slots=("destination", "avoid"),
        train="""
            navigate to {destination:place}
            take me to {destination:place}
            directions to {destination:place}
            how do i get to {destination:place}
            drive to {destination:place} and avoid {avoid:obstacle}
            show me the way to {destination:place}
            start navigation to {destination:place}
            find a route to {destination:place} without {avoid:obstacle}
            what is the fastest way to {destination:place}
            i need to go to {destination:place}
            get me to {destination:place} but no {avoid:obstacle}
        """,
        validation="""
            guide me to {destination:place}
            plan a route to {destination:place} that skips {avoid:obstacle}
            head for {destination:place}
        """,
        test="""
            which way is it to {destination:place}
            bring up directions for {destination:place}
            avoid {avoid:obstacle} on the way to {destination:place}
        """,
    ),
    "find_nearby": Intent(
        slots=("category", "near"),
        train="""
            find a {category} near me
            where is the nearest {category}
            show me a {category} near {near:place}
            is there a {category} around here
            look for the closest {category}
            i need a {category} close to {near:place}
            which {category} is closest
            search for a {category} nearby
            are there any {category} options near {near:place}
            find me the best {category} in the area
            locate a {category} near {near:place}
        """,
        validation="""
            point me to a {category}
            what is the closest {category} to {near:place}
            any {category} within walking distance
        """,
        test="""
            where can i find a {category}
            list each {category} near {near:place}
            i am looking for a {category} around {near:place}
        """,
    ),
    "send_message": Intent(
        slots=("contact", "message"),
        train="""
            text {contact} that {message}
            send a message to {contact} saying {message}
            tell {contact} that {message}
            message {contact} and say {message}
            send {contact} a text saying {message}
            write to {contact} that {message}
            let {contact} know that {message}
            send a text to {contact}
            i want to message {contact}
            please text {contact} and tell them {message}
            send a message that says {message} to {contact}
        """,
        validation="""
            shoot {contact} a text that says {message}
            inform {contact} that {message}
            write a new message to {contact}
        """,
        test="""
            drop {contact} a message saying {message}
            can you let {contact} know {message}
            start a text to {contact} with the words {message}
        """,
    ),
    "make_call": Intent(
        slots=("contact", "phone_type"),
        train="""
            call {contact}
            phone {contact}
            call {contact} on their {phone_type} phone
            make a call to {contact}
            dial {contact}
            please call {contact} now
            i need to talk to {contact}
            ring {contact} at the {phone_type} number
            start a call with {contact}
            can you call {contact} for me
            call the {phone_type} number of {contact}
        """,
        validation="""
            get {contact} on the line
            give {contact} a ring
            place a call to {contact} on the {phone_type} phone
        """,
        test="""
            connect me with {contact}
            i would like to phone {contact}
            try {contact} on the {phone_type} line
        """,
    ),
    "create_event": Intent(
        slots=("event", "date", "time", "attendee"),
        train="""
            add {event} to my calendar on {date:weekday}
            schedule a {event} at {time} {date:relative_day}
            put a {event} on my calendar for {date:calendar_day}
            create an event called {event} on {date:weekday} at {time}
            schedule a {event} with {attendee:contact} at {time}
            book a {event} with {attendee:contact} on {date:weekday}
            set up a {event} {date:relative_day} at {time} with {attendee:contact}
            new calendar entry {event} on {date:calendar_day} at {time}
            i have a {event} on {date:weekday} at {time} please add it
            plan a {event} for {date:relative_day}
            invite {attendee:contact} to a {event} on {date:calendar_day}
        """,
        validation="""
            mark {date:calendar_day} for a {event}
            enter a {event} with {attendee:contact} in my calendar {date:relative_day} at {time}
            save the {event} on {date:weekday} at {time}
        """,
        test="""
            block {time} on {date:weekday} for a {event}
            arrange a {event} with {attendee:contact} on {date:calendar_day}
            make a calendar event for my {event} {date:relative_day}
        """,
    ),
    "check_calendar": Intent(
        slots=("date", "time"),
        train="""
            what's on my calendar {date:relative_day}
            what do i have on {date:weekday}
            am i free on {date:weekday} at {time}
            do i have any meetings {date:relative_day}
            show my schedule for {date:calendar_day}
            read me my appointments for {date:weekday}
            what is my next appointment
            is there anything planned for {date:calendar_day}
            am i busy {date:relative_day} at {time}
            open my calendar
            what is on my agenda for {date:weekday}
        """,
        validation="""
            tell me what i have planned {date:relative_day}
            do i have something going on at {time} on {date:weekday}
            look at my calendar for {date:calendar_day}
        """,
        test="""
            how does my {date:weekday} look
            which appointments do i have on {date:calendar_day}
            is my calendar empty {date:relative_day} at {time}
        """,
    ),
    "switch_lights": Intent(
        slots=("state", "room", "color"),
        train="""
            turn {state} the lights
            turn {state} the {room} lights
            turn the lights in the {room} {state}
            switch {state} the light in the {room}
            lights {state} in the {room}
            please switch the {room} light {state}
            make the {room} lights {color}
            set the lights in the {room} to {color}
            change the light color to {color}
            turn all the lights {state}
            i want {color} light in the {room}
        """,
        validation="""
            can you get the {room} lights {state}
            flip the lights {state} in the {room}
            give the {room} {color} light
        """,
        test="""
            {room} lights {state} please
            i would like the light in the {room} {state}
            turn the lamps in the {room} {color}
        """,
    ),
    "dim_lights": Intent(
        slots=("brightness", "room"),
        train="""
            dim the lights to {brightness:percent}
            dim the {room} lights to {brightness:percent}
            set the {room} brightness to {brightness:percent}
            lower the light in the {room} to {brightness:percent}
            dim the lights in the {room}
            make the lights in the {room} {brightness:percent} bright
            brightness to {brightness:percent} please
            put the {room} lamp at {brightness:percent}
            set the lights at {brightness:percent} in the {room}
            can you dim the {room} lamp
            change the light level to {brightness:percent}
        """,
        validation="""
            bring the {room} lights down to {brightness:percent}
            i need the lights dimmed to {brightness:percent}
            take the {room} brightness to {brightness:percent}
        """,
        test="""
            adjust the brightness in the {room} to {brightness:percent}
            have the {room} lights dimmed to {brightness:percent}
            soften the lights to {brightness:percent}
        """,
    ),
    "set_thermostat": Intent(
        slots=("temperature", "room"),
        train="""
            set the thermostat to {temperature}
            set the temperature to {temperature}
            make it {temperature} in the {room}
            heat the {room} to {temperature}
            cool the {room} down to {temperature}
            turn the heating up to {temperature}
            change the {room} thermostat to {temperature}
            i want it to be {temperature} in here
            put the heat at {temperature} in the {room}
            lower the thermostat to {temperature}
            can you set the {room} to {temperature}
        """,
        validation="""
            bring the house to {temperature}
            warm up the {room} until it is {temperature}
            thermostat to {temperature} please
        """,
        test="""
            keep the {room} at {temperature}
            adjust the heating to {temperature}
            the {room} should be {temperature}
        """,
    ),
    "add_to_list": Intent(
        slots=("item", "quantity"),
        train="""
            add {item} to my shopping list
            put {item} on the shopping list
            add {quantity} of {item} to my shopping list
            we need {item}
            we are out of {item}
            i have to buy {quantity} of {item}
            shopping list add {item}
            please add {item} to the groceries
            put {quantity} of {item} on the grocery list
            write {item} on my shopping list
            include {quantity} of {item} in the shopping
        """,
        validation="""
            get {item} on the grocery list
            we ran out of {item} so add {quantity}
            i want to buy {item}
        """,
        test="""
            note down {item} for shopping
            my shopping list needs {quantity} of {item}
            remember {item} for the groceries
        """,
    ),
    "get_news": Intent(
        slots=("topic", "date"),
        train="""
            what's in the news
            tell me the news about {topic}
            give me the latest headlines
            any news on {topic}
            what is happening with {topic}
            read me the news on {topic}
            news about {topic} from {date:past_day}
            what were the top stories {date:past_day}
            show me headlines about {topic}
            i want to hear the latest on {topic}
            play the news
        """,
        validation="""
            catch me up on {topic}
            what did the papers say about {topic} {date:past_day}
            read the headlines
        """,
        test="""
            is there anything new about {topic}
            fill me in on {topic}
            which headlines were there {date:past_day} about {topic}
        """,
    ),
    "set_volume": Intent(
        slots=("level", "direction", "device"),
        train="""
            set the volume to {level:percent}
            turn the volume up to {level:percent}
            turn it down to {level:percent}
            volume {level:percent}
            set the {device} volume to {level:percent}
            make the {device} {direction:loudness}
            turn {direction:up_or_down} the volume on the {device}
            change the volume of the {device} to {level:percent}
            volume to {level:percent} on the {device}
            please put the sound at {level:percent}
            make it {direction:loudness}
        """,
        validation="""
            bring the sound on the {device} to {level:percent}
            raise the volume to {level:percent}
            the {device} needs to be {direction:loudness}
        """,
        test="""
            adjust the volume to {level:percent}
            i want the {device} at {level:percent} volume
            i would like the {device} {direction:loudness}
        """,
    ),
    "translate": Intent(
        slots=("text", "language"),
        train="""
            translate {text} into {language}
            how do you say {text} in {language}
            what is {text} in {language}
            say {text} in {language}
            translate {text} to {language} please
            can you translate {text} into {language}
            what is the {language} for {text}
            i need to know how to say {text} in {language}
            tell me the {language} translation of {text}
            give me {text} in {language}
            how would i ask {text} in {language}
        """,
        validation="""
            put {text} into {language} for me
            what is the {language} phrase for {text}
            how is {text} said in {language}
        """,
        test="""
            turn {text} into {language}
            i want the {language} version of {text}
            how would someone say {text} in {language}
        """,
    ),
    "convert_units": Intent(
        slots=("amount", "from_unit", "to_unit"),
        train="""
            convert {amount} {from_unit:length} to {to_unit:length}
            convert {amount} {from_unit:weight} to {to_unit:weight}
            how many {to_unit:length} are {amount} {from_unit:length}
            how many {to_unit:capacity} are in {amount} {from_unit:capacity}
            what is {amount} {from_unit:weight} in {to_unit:weight}
            what is {amount} {from_unit:capacity} in {to_unit:capacity}
            {amount} {from_unit:length} in {to_unit:length}
            change {amount} {from_unit:capacity} to {to_unit:capacity}
            how much is {amount} {from_unit:weight} in {to_unit:weight}
            can you convert {amount} {from_unit:capacity} into {to_unit:capacity}
            tell me how many {to_unit:weight} {amount} {from_unit:weight} are
        """,
        validation="""
            turn {amount} {from_unit:length} into {to_unit:length}
            how many {to_unit:weight} do you get from {amount} {from_unit:weight}
            give me {amount} {from_unit:capacity} in {to_unit:capacity}
        """,
        test="""
            express {amount} {from_unit:length} in {to_unit:length}
            if i have {amount} {from_unit:weight} how many {to_unit:weight} is that
            i need {amount} {from_unit:capacity} as {to_unit:capacity}
        """,
    ),
    "convert_currency": Intent(
        slots=("amount", "from_currency", "to_currency"),
        train="""
            convert {amount} {from_currency:currency} to {to_currency:currency}
            how much is {amount} {from_currency:currency} in {to_currency:currency}
            what are {amount} {from_currency:currency} worth in {to_currency:currency}
            exchange {amount} {from_currency:currency} for {to_currency:currency}
            how many {to_currency:currency} do i get for {amount} {from_currency:currency}
            {amount} {from_currency:currency} in {to_currency:currency}
            what is the exchange rate from {from_currency:currency} to {to_currency:currency}
            change {amount} {from_currency:currency} into {to_currency:currency}
            tell me what {amount} {from_currency:currency} are in {to_currency:currency}
            calculate {amount} {from_currency:currency} in {to_currency:currency}
            how many {to_currency:currency} are {amount} {from_currency:currency}
        """,
        validation="""
            turn {amount} {from_currency:currency} into {to_currency:currency}
            what would {amount} {from_currency:currency} be in {to_currency:currency}
            give me the rate between {from_currency:currency} and {to_currency:currency}
        """,
        test="""
            if i swap {amount} {from_currency:currency} how many {to_currency:currency} is that
            i need {amount} {from_currency:currency} as {to_currency:currency}
            how do {from_currency:currency} compare to {to_currency:currency}
        """,
    ),
    "find_recipe": Intent(
        slots=("dish", "ingredient"),
        train="""
            find a recipe for {dish}
            how do i make {dish}
            show me how to cook {dish}
            what can i cook with {ingredient}
            i want to make {dish} with {ingredient}
            give me a recipe with {ingredient}
            how long does {dish} take to cook
            look up a recipe for {dish} without {ingredient}
            what goes into {dish}
            recipe for {dish} please
            search for {dish} recipes that use {ingredient}
        """,
        validation="""
            teach me to cook {dish}
            which dishes can i make from {ingredient}
            i feel like cooking {dish} with {ingredient}
        """,
        test="""
            what do i need to prepare {dish}
            suggest something to cook using {ingredient}
            get me instructions for {dish} with {ingredient}
        """,
    ),
    "get_score": Intent(
        slots=("team", "opponent", "date"),
        train="""
            what's the score of the {team} game
            did the {team} win
            did the {team} win {date:past_day}
            how did the {team} do against the {opponent:team}
            who won the {team} game {date:past_day}
            what was the score between the {team} and the {opponent:team}
            are the {team} winning
            give me the {team} score
            {team} against the {opponent:team} score please
            did the {team} beat the {opponent:team} {date:past_day}
            final score of the {team} match
        """,
        validation="""
            how are the {team} doing
            did the {team} lose to the {opponent:team}
            tell me how the {team} played {date:past_day}
        """,
        test="""
            result of the {team} game please
            have the {team} beaten the {opponent:team}
            how many points did the {team} get {date:past_day}
        """,
    ),
    "book_taxi": Intent(
        slots=("pickup", "destination", "time"),
        train="""
            get me a taxi to {destination:place}
            book a cab to {destination:place} at {time}
            i need a taxi from {pickup:place} to {destination:place}
            order a taxi for {time}
            call a cab to take me to {destination:place}
            book a ride from {pickup:place} to {destination:place} at {time}
            get me a ride to {destination:place}
            i want to be picked up at {pickup:place} by taxi
            order a cab from {pickup:place}
            please book a taxi to {destination:place} for {time}
            can you get a taxi
        """,
        validation="""
            hail a cab to {destination:place}
            reserve a taxi from {pickup:place} to {destination:place}
            i need a ride at {time} to {destination:place}
        """,
        test="""
            have a taxi bring me to {destination:place}
            request a cab at {time} from {pickup:place}
            arrange a ride from {pickup:place} to {destination:place}
        """,
    ),
    "book_table": Intent(
        slots=("restaurant", "party_size", "date", "time"),
        train="""
            book a table at {restaurant} for {party_size}
            reserve a table for {party_size} at {restaurant} {date:relative_day}
            get me a table at {restaurant} at {time}
            make a reservation at {restaurant} on {date:weekday} at {time}
            i want to eat at {restaurant} {date:relative_day}
            table for {party_size} at {restaurant} at {time} please
            book dinner at {restaurant} for {party_size} people on {date:calendar_day}
            can you reserve a table at {restaurant}
            we are {party_size} people and want a table at {restaurant}
            make a dinner reservation for {party_size} on {date:weekday}
            reserve {restaurant} for {time} {date:relative_day}
        """,
        validation="""
            find us a table for {party_size} at {restaurant} on {date:weekday}
            i would like a reservation at {restaurant} for {time}
            see if {restaurant} has a table {date:relative_day}
        """,
        test="""
            hold a table at {restaurant} for {party_size} people
            ask {restaurant} for a table at {time} on {date:calendar_day}
            we want to have dinner at {restaurant} {date:relative_day}
        """,
    ),
    "get_time": Intent(
        slots=("city",),
        train="""
            what time is it
            what time is it in {city}
            tell me the time
            what's the time in {city}
            current time in {city}
            how late is it in {city}
            time in {city} please
            can you tell me what time it is in {city}
            do you have the time
            what is the local time in {city}
            how late is it
        """,
        validation="""
            give me the time in {city}
            what does the clock say in {city}
            please tell me how late it is
        """,
        test="""
            i want to know the time in {city}
            is it morning or evening in {city}
            what does the clock show
        """,
    ),
    "define_word": Intent(
        slots=("word",),
        train="""
            what does {word} mean
            define {word}
            what is the definition of {word}
            look up the word {word}
            what is the meaning of {word}
            explain the word {word}
            tell me what {word} means
            i do not know the word {word}
            give me a definition for {word}
            dictionary entry for {word}
            can you define {word} for me
        """,
        validation="""
            what is meant by {word}
            find {word} in the dictionary
            how would you define {word}
        """,
        test="""
            is there a definition of {word}
            what do people mean by {word}
            help me understand the word {word}
        """,
    ),
    "tell_joke": Intent(
        slots=(),
        train="""
            tell me a joke
            make me laugh
            say something funny
            do you know any jokes
            another joke please
            i want to hear a joke
            give me your best joke
            got any good jokes
            cheer me up with a joke
            can you be funny
            tell a funny joke
        """,
        validation="""
            let me hear something funny
            i could use a good laugh
            what is the funniest joke you know
        """,
        test="""
            crack a joke
            surprise me with a joke
            do you have a joke for me
        """,
    ),
}


# --- Slot values -----------------------------------------------------------------------------------------------------

# Closed pools: words of a fixed set, the same in every split.
CLOSED: dict[str, str] = {
    "relative_day": """today, tomorrow, tonight, this evening, tomorrow morning, tomorrow evening, this weekend,
        the day after tomorrow, next monday, next tuesday, next wednesday, next thursday, next friday, next saturday,
        next sunday, this afternoon, tomorrow afternoon""",
    "past_day": """yesterday, last night, today, this morning, last weekend, last week, last monday, last tuesday,
        last wednesday, last thursday, last friday, last saturday, last sunday""",
    "weekday": "monday, tuesday, wednesday, thursday, friday, saturday, sunday",
    "state": "on, off",
    "room": """kitchen, bedroom, living room, bathroom, hallway, office, garage, dining room, basement, nursery, attic,
        guest room, study, laundry room, playroom, sunroom""",
    "color": "red, blue, green, yellow, purple, orange, pink, warm white, cool white, turquoise, violet, amber",
    "device": "speaker, tv, radio, headphones, kitchen speaker, soundbar, tablet, bedroom speaker, phone, laptop",
    "loudness": "louder, quieter, softer, a bit louder, a bit quieter, much louder, much quieter",
    "up_or_down": "up, down",
    "phone_type": "mobile, home, work, office, cell",
    "obstacle": "tolls, highways, ferries, traffic, tunnels, toll roads, bridges, roadworks, downtown",
    "genre": """jazz, rock, classical, hip hop, country, blues, reggae, techno, folk, soul, funk, disco, punk, opera,
        heavy metal, bossa nova, ambient, gospel""",
    "language": """french, spanish, german, italian, portuguese, dutch, polish, japanese, korean, turkish, swedish,
        greek, hindi, arabic, finnish, czech, hungarian, vietnamese""",
    "length": "miles, kilometers, meters, feet, inches, centimeters, yards, millimeters",
    "weight": "pounds, kilograms, grams, ounces, tons, stones, milligrams",
    "capacity": "liters, gallons, cups, pints, milliliters, tablespoons, teaspoons, quarts, fluid ounces",
    "currency": """dollars, euros, pounds, yen, swiss francs, pesos, rupees, swedish kronor, zlotys, won, lira,
        canadian dollars, australian dollars, rand""",
    "quantity": """two bags, three boxes, a pack, a bottle, four cans, two pounds, a jar, a dozen packs, three bottles,
        half a pound, six bottles, a box, five packs, a bag, two jars""",
    "party_size": "two, three, four, five, six, seven, eight, nine, ten, eleven, twelve, 2, 3, 4, 5, 6, 7, 8, 9, 10",
    "street_type": "Street, Avenue, Road, Lane",
    "venue": "Museum, Station, Library, Park, Hospital, Mall, Theater, Stadium, School, Airport, Hotel, Beach",
    "kitchen": "Kitchen, Diner, Grill, Bistro, Cafe, Steakhouse, Pizzeria, Noodle Bar",
    "dish_form": "soup, curry, pie, salad, risotto, stew, pasta, casserole, tacos, stir fry, omelette",
}

# Open pools: each value belongs to one split (`share`).
OPEN: dict[str, str] = {
    "first_name": """Alice, Ben, Carla, David, Elena, Felix, Grace, Hannah, Ivan, Julia, Kevin, Laura, Marcus, Nina,
        Oscar, Paula, Quentin, Rosa, Samuel, Tessa, Umar, Vera, Walter, Ximena, Yusuf, Zoe, Aaron, Bianca, Caleb, Dora,
        Ethan, Fiona, Gustav, Helga, Isaac, Jasmine, Karim, Leila, Miguel, Nadia, Olga, Pedro, Ravi, Sofia, Tomas,
        Ursula, Victor, Wendy, Yara, Zachary, Amara, Boris, Chloe, Dmitri, Esther, Farah, Gloria, Hugo, Irene, Jonas,
        Keiko, Lars, Mei, Noah, Opal, Priya, Rafael, Sanjay, Thea, Viktor, Anita, Bruno, Celia, Derek, Emil, Freya,
        Gareth, Hector, Imani, Joel, Kira, Leon, Maya, Nils, Otto, Petra, Renata, Silas, Tariq, Violet""",
    "relative": """mom, dad, grandma, grandpa, my sister, my brother, my wife, my husband, my boss, my neighbor,
        my uncle, my aunt, my roommate, my cousin, my landlord, my teacher, my doctor, my coach, my babysitter,
        my daughter, my son, my manager, my lawyer, my plumber, my dentist, my girlfriend, my boyfriend""",
    "last_name": """Adams, Brennan, Castillo, Dietrich, Eriksen, Fischer, Gupta, Hoffman, Ibrahim, Jensen, Kowalski,
        Lindgren, Moreno, Novak, Okafor, Petrov, Quinn, Rossi, Schneider, Tanaka, Ueda, Vargas, Whitfield, Xu, Yamada,
        Zimmer, Abbott, Baptiste, Chandra, Dubois, Espinoza, Farrell, Gallagher, Haddad, Iversen, Kaplan, Lombardi,
        Marsh, Nakamura, Osborne, Pereira, Ramirez, Sorensen, Thornton, Villanueva, Weber, Yilmaz, Zhang""",
    "city": """Paris, London, Tokyo, Berlin, Madrid, Rome, Chicago, Boston, Seattle, Denver, Toronto, Sydney, Dublin,
        Oslo, Vienna, Prague, Lisbon, Athens, Cairo, Mumbai, Singapore, Bangkok, Istanbul, Helsinki, Warsaw, Budapest,
        Munich, Hamburg, Zurich, Geneva, Milan, Naples, Barcelona, Seville, Porto, Brussels, Amsterdam, Copenhagen,
        Stockholm, Edinburgh, Glasgow, Manchester, Liverpool, Miami, Dallas, Houston, Phoenix, Portland, Atlanta,
        Detroit, New York, Los Angeles, San Diego, New Orleans, Salt Lake City, Mexico City, Buenos Aires, Santiago,
        Lima, Bogota, Nairobi, Lagos, Accra, Cape Town, Delhi, Kolkata, Jakarta, Manila, Seoul, Osaka, Kyoto, Beijing,
        Shanghai, Hong Kong, Melbourne, Brisbane, Auckland, Vancouver, Montreal, Reykjavik""",
    "street": """Maple, Oak, Cedar, Willow, Birch, Juniper, Chestnut, Magnolia, Lincoln, Franklin, Jefferson, Harrison,
        Market, Mill, Bridge, Harbor, Church, Station Hill, Orchard, Meadow, Riverside, Lakeview, Sunset, Highland,
        Prospect, Spring, Canal, Garden, King, Queen, Victoria, Albert, Park Hill, Union, Liberty, Foundry, Mason,
        Baker, Weaver, Cooper, Granite, Quarry, Summit, Valley, Hillcrest, Fairview, Windsor, Sycamore, Poplar,
        Hawthorn, Laurel, Hazel, Linden, Clover""",
    "category": """gas station, pharmacy, coffee shop, supermarket, bakery, bank, post office, gym, bookstore,
        parking garage, charging station, car wash, hardware store, hair salon, barber shop, pizza place, sushi bar,
        vegan restaurant, movie theater, playground, swimming pool, laundromat, dry cleaner, pet store, vet, dentist,
        hospital, walk-in clinic, hotel, hostel, campground, bus stop, subway station, bike shop, flower shop,
        toy store, butcher, farmers market, frozen yogurt shop, tea house, burger joint, taco stand, nail salon,
        shoe store, music store, police station, library, public restroom, tennis court, golf course""",
    "adjective": """Silver, Golden, Broken, Midnight, Crimson, Hollow, Electric, Paper, Velvet, Frozen, Distant,
        Wandering, Quiet, Burning, Lonely, Neon, Crystal, Faded, Restless, Hidden, Scarlet, Wooden, Endless, Gentle,
        Stormy, Sleepy, Copper, Emerald, Rusty, Tender, Reckless, Shining, Drifting, Secret, Bitter, Glass, Marble,
        Sapphire, Wild, Foggy, Amber, Rolling, Borrowed, Painted, Salty, Dusty, Northern, Southern, Violent, Patient""",
    "noun": """River, Harbor, Garden, Mirror, Highway, Lantern, Mountain, Ocean, Window, Letter, Summer, Winter,
        Shadow, Candle, Anchor, Feather, Island, Engine, Meadow Song, Horizon, Carousel, Compass, Cathedral, Satellite,
        Orchid, Avalanche, Lullaby, Parade, Thunder, Desert, Moonlight, Machine, Kingdom, Postcard, Staircase, Balloon,
        Telescope, Waterfall, Radio, Skyline, Diamond, Pendulum, Lighthouse, Boulevard, Tornado, Umbrella""",
    "animals": """Foxes, Wolves, Sparrows, Tigers, Owls, Ravens, Pandas, Otters, Falcons, Hornets, Badgers, Dolphins,
        Lions, Bears, Eagles, Sharks, Panthers, Bulls, Hawks, Cobras, Rams, Mustangs, Beavers, Coyotes, Gators,
        Penguins, Rhinos, Stallions, Vipers, Bison, Lynxes, Herons, Cranes, Jaguars, Moose, Pelicans, Turtles,
        Scorpions, Kestrels, Buffaloes""",
    "town": """Oakvale, Riverton, Stonebridge, Ashford, Brookfield, Clearwater, Dunmore, Eastport, Fairhaven, Glenwood,
        Hartwell, Ironwood, Kingsport, Lakewood, Millbrook, Northgate, Pinecrest, Ridgemont, Silverton, Thornbury,
        Underhill, Westbrook, Wexham, Yarrow, Bayside, Coldwater, Elmhurst, Foxborough, Greenfield, Holloway,
        Larkspur, Maplewood, Newhaven, Redcliff, Seabrook, Whitestone""",
    "task": """water the plants, buy milk, call the bank, pay the rent, feed the cat, take out the trash,
        pick up the laundry, renew my passport, book the flights, return the library books, charge the car,
        clean the fridge, send the invoice, mow the lawn, change the air filter, take my medicine, walk the dog,
        order a birthday cake, fix the bike, print the tickets, check the oil, wash the car, iron my shirt,
        pack my suitcase, defrost the chicken, call the plumber, cancel the subscription, back up my laptop,
        sign the permission slip, pick up the kids, drop off the package, buy stamps, update my resume,
        submit the report, vacuum the stairs, bake the cookies, refill the prescription, buy wrapping paper,
        study for the exam, practice the piano, wish Sam a happy birthday, empty the dishwasher, lock the back door,
        buy a gift for the wedding, turn off the sprinkler, bring in the mail, make a haircut appointment,
        transfer the money, collect the dry cleaning, sharpen the knives, finish the slides, prepare the guest bed,
        sort the recycling, descale the kettle, replace the smoke detector battery, thank the neighbors,
        measure the windows, email the accountant, reply to the landlord, stretch my back, drink some water,
        buy new running shoes, sweep the porch, prune the roses, ask about the discount, file my taxes""",
    "chore": """laundry, homework, workout, tea, nap, meditation, kettle, dishwasher, reading, piano practice, yoga,
        parking, washing machine, pizza, dough, noodle, study, break, cookie, plank, bath, cleaning, coffee, chess,
        screen time, grill, dryer, stretching, running, barbecue, gaming, shower, painting, lunch, baby bottle""",
    "event": """dentist appointment, team meeting, budget review, birthday party, job interview, yoga class, haircut,
        parent teacher conference, doctor visit, lunch, dinner party, book club, piano lesson, soccer practice,
        project kickoff, sales call, movie night, baby shower, wedding rehearsal, car inspection, vet visit,
        photo shoot, band rehearsal, barbecue, garage sale, board meeting, training session, hiking trip,
        flight to Denver, train to Boston, house viewing, coffee break, performance review, game night,
        swimming lesson, vision test, tax consultation, study group, choir practice, farewell party, school play,
        bowling night, road trip, pottery class, town hall, design workshop, safety briefing, blood test, brunch,
        graduation ceremony, charity run, product demo""",
    "statement": """i am running late, the train is delayed, dinner is ready, i am on my way, the meeting was moved,
        i forgot my keys, we won the game, the package has arrived, i will be home soon, the car broke down,
        i am stuck in traffic, the baby is asleep, i got the job, the store is closed, i found your wallet,
        the flight was cancelled, i am feeling better, we are at the park, the cake turned out great, my phone is dying,
        i left the door open, the plumber is here, school ends early, i booked the hotel, the tickets are sold out,
        we need more chairs, the dog ran away, i passed the exam, practice is cancelled, the movie starts soon,
        i am waiting outside, the power is out, i sent the documents, the kids are fine, the bus never came,
        i bought the groceries, grandpa is visiting, the printer works again, i cannot make it, the concert was amazing,
        the heating is broken, i lost my umbrella, breakfast is on the table, we are almost there,
        the roof is leaking, i finished the report, the guests are early, my shift got longer""",
    "follow_up": """please call me back, see you soon, do not wait for me, start without me, i will explain later,
        please hurry, thanks for everything, let me know what you think, we should celebrate, i owe you one,
        bring a jacket, save me a seat, have fun, do not worry, i need your help, check your email, please be careful,
        take your time, sorry about that, we can talk tonight, send me the address, meet me at the corner,
        i miss you, good luck, keep it a secret, answer when you can, buy some snacks, please feed the dog,
        leave the key under the mat, drive safely""",
    "item": """milk, eggs, bread, butter, bananas, apples, coffee, toilet paper, olive oil, rice, pasta, tomatoes,
        onions, potatoes, cheese, yogurt, chicken breast, ground beef, salmon, orange juice, cereal, oatmeal, honey,
        sugar, flour, salt, black pepper, garlic, carrots, broccoli, spinach, lettuce, cucumbers, mushrooms, lemons,
        limes, grapes, strawberries, blueberries, avocados, peanut butter, jam, maple syrup, dish soap, paper towels,
        laundry detergent, trash bags, toothpaste, shampoo, batteries, light bulbs, dog food, cat litter, diapers,
        frozen peas, ice cream, sparkling water, green tea, dark chocolate, almonds, walnuts, raisins, crackers,
        tortilla chips, salsa, hummus, tofu, soy sauce, vinegar, mustard, ketchup, mayonnaise, baking powder, vanilla,
        cinnamon, oat milk, sour cream, bagels, hot dog buns, aluminum foil, sponges, birthday candles, napkins""",
    "topic": """climate change, the election, the stock market, space exploration, electric cars,
        artificial intelligence, the housing market, the world cup, renewable energy, the hurricane, the royal family,
        the olympics, inflation, the trade talks, the wildfires, the budget vote, public transport, the film festival,
        the strike, gas prices, football transfers, the peace talks, the school reform, the flu season, cyber security,
        the mars mission, the tech industry, the heat wave, the airline merger, gene therapy, the music awards,
        the volcano, the supreme court, whale migration, interest rates, video games, the earthquake, solar power,
        the new museum, quantum computing, the fashion week, the coffee harvest, ocean plastic, the chess tournament,
        the minimum wage, self driving trucks, the water shortage, the marathon""",
    "text": """good morning, where is the station, how much does this cost, i would like a coffee, thank you very much,
        can you help me, i am lost, the bill please, nice to meet you, see you later, good night, where is the bathroom,
        i do not understand, what is your name, i am allergic to nuts, one ticket please, happy birthday, i love you,
        is this seat taken, call a doctor, i am hungry, excuse me, how are you, welcome home, cheers, have a nice trip,
        what time does it open, i need a pharmacy, two beers please, left or right, my luggage is missing,
        do you speak english, i am a vegetarian, can i pay by card, the room is too cold, congratulations, good luck,
        i missed the bus, where are you from, the food is delicious, a glass of water, it is very beautiful,
        how far is the beach, i am looking for my friend, please speak slowly, when does the train leave, best wishes,
        i have a reservation, what do you recommend, keep the change, the shower is broken, see you next week""",
    "dish_name": """lasagna, pancakes, chili, meatloaf, pad thai, ratatouille, goulash, paella, shepherd's pie,
        chicken parmesan, beef wellington, banana bread, apple crumble, falafel, pierogi, gumbo, jambalaya, tiramisu,
        fish and chips, french toast, cinnamon rolls, fried rice, spring rolls, ramen, moussaka, gnocchi, carbonara,
        quiche, chicken noodle soup, clam chowder, pulled pork, cornbread, brownies, cheesecake, waffles, minestrone,
        butter chicken, enchiladas, stuffed peppers, scones, bibimbap, schnitzel, cannelloni, baklava, bruschetta""",
    "ingredient": """pumpkin, lentil, chickpea, zucchini, eggplant, cauliflower, shrimp, turkey, lamb, tuna, bacon,
        cabbage, kale, leek, fennel, beetroot, celery, asparagus, sweet potato, black bean, goat cheese, coconut,
        cashew, ginger, basil, parsnip, artichoke, duck, crab, mozzarella, ricotta, corn, red pepper, radish, quinoa,
        barley, pear, cherry, mango, apricot, rosemary, squid""",
    "word": """serendipity, ephemeral, ubiquitous, paradox, nostalgia, ambiguous, resilience, eloquent, melancholy,
        pragmatic, altruism, benevolent, candid, dilemma, empathy, frugal, gregarious, hypothesis, idiosyncrasy,
        juxtapose, kinetic, lucid, meticulous, nuance, obsolete, plausible, quixotic, reticent, stoic, tenacious,
        ulterior, vicarious, whimsical, zealous, anomaly, catalyst, diligent, entropy, fiasco, gratuitous, heuristic,
        impeccable, jargon, lethargic, mundane, novice, ominous, peculiar, quandary, rhetoric, skeptical, trivial,
        utopia, verbose, wanderlust, archaic, brevity, cynical, deference, epiphany""",
}

# Open pools made of others; as the parts are split, so are the wholes.
COMPOSED: dict[str, tuple[str, ...]] = {
    "contact": ("{first_name}", "{relative}", "{first_name} {last_name}"),
    "artist": ("The {adjective} {animals}", "{first_name} {last_name}", "{first_name} and the {animals}"),
    "song": ("{adjective} {noun}", "The {noun}", "{noun} in {city}", "Dancing with {first_name}"),
    "place": ("{house_number} {street} {street_type}", "{street} {venue}", "{town}", "the {town} {venue}"),
    "restaurant": ("{first_name}'s {kitchen}", "The {adjective} {noun}", "{town} {kitchen}"),
    "team": ("{animals}", "{town} {animals}"),
    "dish": ("{dish_name}", "{ingredient} {dish_form}"),
    "message": ("{statement}", "{follow_up}", "{statement} and {follow_up}"),
}


HOURS = "one, two, three, four, five, six, seven, eight, nine, ten, eleven, twelve"
MONTHS = "january, february, march, april, may, june, july, august, september, october, november, december"


def listed(text: str) -> list[str]:
    """Returns the values of a table's entry, which commas separate."""
    return [" ".join(value.split()) for value in text.split(",")]


def clock_times() -> Iterator[str]:
    """Yields the times of a day, every five minutes, as one says or reads them."""
    for half, hour, minute in itertools.product(("am", "pm"), range(1, 13), range(0, 60, 5)):
        yield f"{hour}:{minute:02d} {half}" if minute else f"{hour} {half}"
    for words, hour_name in itertools.product(("half past", "quarter past", "quarter to"), listed(HOURS)):
        yield f"{words} {hour_name}"


def durations() -> Iterator[str]:
    """Yields durations from five seconds to twelve hours."""
    yield from (f"{seconds} seconds" for seconds in range(5, 100, 5))
    yield from (f"{minutes} minutes" for minutes in range(2, 91))
    yield from (f"{hours} hours" for hours in range(2, 13))
    for hours, minutes in itertools.product(("1 hour", "2 hours", "3 hours"), range(5, 60, 5)):
        yield f"{hours} and {minutes} minutes"


def calendar_days() -> Iterator[str]:
    """Yields the days that every month has, such as `march 3rd`."""
    for month, day in itertools.product(listed(MONTHS), range(1, 29)):
        suffix = "th" if 11 <= day <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(day % 10, "th")
        yield f"{month} {day}{suffix}"


# Open pools of numbers, dates and times.
GENERATED: dict[str, tuple[str, ...]] = {
    "time": tuple(clock_times()),
    "duration": tuple(durations()),
    "calendar_day": tuple(calendar_days()),
    "percent": tuple(f"{number} percent" for number in range(1, 101)),
    "temperature": tuple(f"{number} degrees" for number in (*range(10, 90), *(n + 0.5 for n in range(14, 29)))),
    "amount": (*map(str, range(2, 400)), *map(str, range(400, 5000, 50)), *(f"{n}.5" for n in range(1, 60))),
    "house_number": tuple(map(str, range(1, 100))),
}


# --- Rows ------------------------------------------------------------------------------------------------------------

SLOT = re.compile(r"\{(\w+)(?::(\w+))?\}")


def share(values: Sequence[str], split: str) -> tuple[str, ...]:
    """Returns the values of an open pool that belong to a split: 70 % to train and 15 % to each of the others.

    The order of their checksums decides, which is as good as chance and stays the same everywhere.
    """
    ranked = sorted(set(values), key=lambda value: (zlib.crc32(value.encode()), value))
    first, second = round(0.7 * len(ranked)), round(0.85 * len(ranked))
    parts = {"train": ranked[:first], "validation": ranked[first:second], "test": ranked[second:]}
    return tuple(parts[split])


def slots_of(phrasing: str) -> list[tuple[str, str]]:
    """Returns the slots of a phrasing in their order, each with its pool."""
    return [(slot, pool or slot) for slot, pool in SLOT.findall(phrasing)]


def fill(phrasing: str, values: list[str]) -> str:
    """Returns the phrasing with its slots replaced by `values` in their order."""
    remaining = iter(values)
    return SLOT.sub(lambda match: next(remaining), phrasing)


@cache
def pool_values(pool: str, split: str) -> tuple[str, ...]:
    """Returns the values of a pool that may be used in a split, each once."""
    if pool in CLOSED:
        return tuple(listed(CLOSED[pool]))
    if pool in COMPOSED:
        made = []
        for pattern in COMPOSED[pool]:
            parts = [pool_values(part, split) for _, part in slots_of(pattern)]
            made += [fill(pattern, list(values)) for values in itertools.product(*parts)]
        return tuple(dict.fromkeys(made))
    return share(GENERATED[pool] if pool in GENERATED else listed(OPEN[pool]), split)


@dataclass(frozen=True)
class Phrasing:
    """One phrasing of an intent in a split. Its commands are numbered from 0 to `count` - 1."""

    intent: str
    text: str
    split: str

    @property
    def count(self) -> int:
        """In how many ways the slots can be filled."""
        total, pools = 1, [pool for _, pool in slots_of(self.text)]
        for position, pool in enumerate(pools):
            total *= len(pool_values(pool, self.split)) - pools[:position].count(pool)
        return total

    def command(self, number: int) -> tuple[str, dict[str, str]]:
        """Returns a command and its slots, in the order of the answer's keys."""
        values: dict[str, str] = {}
        taken: dict[str, list[str]] = {}
        for slot, pool in slots_of(self.text):
            choices = pool_values(pool, self.split)
            if pool in taken:
                choices = tuple(value for value in choices if value not in taken[pool])
            number, choice = divmod(number, len(choices))
            values[slot] = choices[choice]
            taken.setdefault(pool, []).append(choices[choice])
        ordered = {slot: values[slot] for slot in INTENTS[self.intent].slots if slot in values}
        return fill(self.text, list(values.values())), ordered


def phrasings(split: str) -> list[Phrasing]:
    """Returns the phrasings of all intents in a split.

    Raises:
        ValueError: there is no such split.
    """
    if split not in SPLITS:
        raise ValueError(f"split={split!r} is unknown; the splits are {', '.join(SPLITS)}.")
    return [Phrasing(intent, text, split) for intent in INTENTS for text in INTENTS[intent].phrasings(split)]


def as_row(command: str, intent: str, slots: dict[str, str]) -> dict[str, Any]:
    """Returns a command and its answer as a row of messages."""
    messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": command}]
    answer = json.dumps({"intent": intent, "slots": slots}, ensure_ascii=False)
    return {"prompt": messages, "completion": answer}


def generate(split: str, rows: int, seed: int) -> list[dict[str, Any]]:
    """Returns `rows` rows of a split, no command twice.

    Every row draws an intent, then one of its phrasings, then the values, each with equal chances among those of which
    something is left. So the few commands of intents without slots are used up early in a large set.

    Raises:
        ValueError: there is no such split, or it has fewer rows.
    """
    todo: dict[str, list[Phrasing]] = {}
    for phrasing in phrasings(split):
        todo.setdefault(phrasing.intent, []).append(phrasing)
    possible = sum(phrasing.count for group in todo.values() for phrasing in group)
    if rows < 1:
        raise ValueError(f"rows={rows} is out of range; at least 1 is needed.")
    if rows > possible:
        raise ValueError(f"rows={rows} is out of range; split {split!r} has at most {possible} unique rows.")
    # A text as seed tells -1 from 1 and keeps the splits apart.
    draw = random.Random(f"{split} {seed}")
    used: dict[Phrasing, set[int]] = {phrasing: set() for group in todo.values() for phrasing in group}
    made: dict[str, dict[str, Any]] = {}
    while len(made) < rows:
        if not todo:
            raise ValueError(f"rows={rows} is out of range; split {split!r} has at most {len(made)} unique rows.")
        intent = draw.choice(list(todo))
        phrasing = draw.choice(todo[intent])
        number = draw.randrange(phrasing.count)
        if number in used[phrasing]:
            continue
        used[phrasing].add(number)
        if len(used[phrasing]) == phrasing.count:
            todo[intent].remove(phrasing)
            if not todo[intent]:
                del todo[intent]
        command, slots = phrasing.command(number)
        made.setdefault(command, as_row(command, intent, slots))
    return list(made.values())


def parse_arguments() -> argparse.Namespace:
    """Returns the command line's arguments."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--split", required=True, help="train, validation or test")
    parser.add_argument("--rows", type=int, required=True, help="how many rows to write")
    parser.add_argument("--seed", type=int, default=0, help="another seed gives other rows (default 0)")
    parser.add_argument("--out", type=Path, metavar="FILE", help="where to write them; default standard output")
    parser.add_argument("--plain", action="store_true", help="write each prompt as the bare command, not as messages")
    return parser.parse_args()


def run() -> None:
    """Writes the rows, one a line."""
    arguments = parse_arguments()
    rows = generate(arguments.split, arguments.rows, arguments.seed)
    if arguments.plain:
        rows = [{**row, "prompt": row["prompt"][-1]["content"]} for row in rows]
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    if arguments.out is None:
        sys.stdout.write(text)
        sys.stdout.flush()
    else:
        arguments.out.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    run_program(run)
